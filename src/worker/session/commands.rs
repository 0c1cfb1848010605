//! The commands of the supervisor in charge.

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::{Answer, Next, Session};
use crate::protocol::{FromWorker, ToWorker};
use crate::resize::SizeRequest;
use cleat_backend::CredentialSet;
#[cfg(feature = "fault")]
use cleat_backend::Image;
use cleat_core::error::{Error, ErrorKind, Result};

/// How long `Stop` waits for running requests before it cuts them off.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// How long `FailIo` waits for the connections, and for their requests at the backend.
const FAIL_TIMEOUT: Duration = Duration::from_millis(250);

impl Session {
    /// Handles a message, or the end, of the channel to the supervisor in charge.
    pub(super) fn on_channel(&mut self) -> Next {
        let Some(received) = self.supervisors.receive() else { return Next::Continue };
        // Any message but a ping ends an offer: it means that the successor has not taken the connections.
        let is_ping = matches!(received, Ok(Some((ToWorker::Ping, _))));
        if !is_ping && self.end_offer() == Next::Exit {
            return Next::Exit;
        }
        match received {
            Ok(Some((ToWorker::Stop, _))) => {
                tracing::info!("stopped by the supervisor");
                if let Err(error) = self.connections.server.stop(STOP_TIMEOUT) {
                    tracing::warn!(error = %error.report(), "connections were cut off");
                }
                Next::Exit
            }
            Ok(Some((ToWorker::RefreshSize, _))) => self.request_size(SizeRequest::Refresh),
            Ok(Some((ToWorker::Resize { size, shrink }, _))) => {
                let smaller = shrink && size < self.image.size();
                self.request_size(match smaller {
                    true => SizeRequest::Shrink(size),
                    false => SizeRequest::Resize(size),
                })
            }
            Ok(Some((command, descriptors))) => {
                match self.execute(command, descriptors) {
                    Ok((answer, descriptors)) => self.send_with(&answer, &descriptors),
                    Err(error) => self.send_failure(&error),
                }
                Next::Continue
            }
            Ok(None) => self.on_channel_end(),
            Err(error)
                if matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported) =>
            {
                tracing::warn!(error = %error.report(), "the supervisor sent no valid command");
                self.send_failure(&error);
                Next::Continue
            }
            Err(error) => {
                tracing::warn!(error = %error.report(), "the channel broke");
                self.on_channel_end()
            }
        }
    }

    fn on_channel_end(&mut self) -> Next {
        self.supervisors.drop_current();
        if self.connections.have_been_served() {
            tracing::warn!("the supervisor is gone; the device stays served");
            // The loop turns again, for a snapshot that waits for the supervisor.
            self.waker.wake();
            return Next::Continue;
        }
        tracing::info!("the supervisor is gone before any connection was served");
        Next::Exit
    }

    /// Passes a request to the thread for sizes. The answer is sent once the backend has answered.
    fn request_size(&mut self, request: SizeRequest) -> Next {
        if let Err(error) = self.resizer.request(request) {
            self.send_failure(&error);
        }
        Next::Continue
    }

    fn execute(&mut self, command: ToWorker, descriptors: Vec<OwnedFd>) -> Result<Answer> {
        match command {
            ToWorker::PrepareHandover => self.prepare_handover(),
            ToWorker::OfferHandover { generation, limit_ms } => {
                self.offer_handover(generation, limit_ms)
            }
            other => self.execute_plain(other, descriptors).map(|answer| (answer, Vec::new())),
        }
    }

    /// Executes a command whose answer has no descriptors.
    fn execute_plain(
        &mut self,
        command: ToWorker,
        descriptors: Vec<OwnedFd>,
    ) -> Result<FromWorker> {
        match command {
            ToWorker::Serve => {
                // Their requests would not be held.
                self.hold.end(&self.connections.server, "the device gets new connections")?;
                self.connections.serve(descriptors).map(|()| FromWorker::Serving)
            }
            ToWorker::SetPolicy(policy) => {
                policy.limits.check()?;
                self.connections.server.set_policy(policy);
                self.start.policy = policy;
                Ok(FromWorker::Done)
            }
            ToWorker::RenewCredentials { credentials } => {
                self.renew_credentials(&credentials, descriptors).map(|()| FromWorker::Done)
            }
            #[cfg(feature = "fault")]
            ToWorker::SetFault { plan } => {
                set_fault(&*self.image, &plan).map(|()| FromWorker::Done)
            }
            ToWorker::FailIo { fail: true } => {
                tracing::warn!("every request fails from now on, by the supervisor's command");
                let deadline = self.clock.now() + FAIL_TIMEOUT;
                self.connections.server.set_fail_io(true);
                self.hold.pass_failing(&self.connections.server);
                let requests = self.connections.server.fail_all_io(FAIL_TIMEOUT)?;
                // A change of the volume's size is a request to the backend, too.
                let at_backend =
                    requests + self.resizer.unanswered() + self.stop_background(deadline);
                Ok(FromWorker::IoFails { at_backend })
            }
            ToWorker::FailIo { fail: false } => {
                self.hold.end(&self.connections.server, "all requests have failed for a while")?;
                self.connections.server.set_fail_io(false);
                self.restart_background();
                Ok(FromWorker::Done)
            }
            ToWorker::Quiesced { snapshot, errno } => {
                self.quiesce.answer(snapshot, errno).map(|()| FromWorker::Done)
            }
            ToWorker::Ping => {
                self.resizer.check_on_ping();
                Ok(FromWorker::Done)
            }
            // Every command has already ended an offer.
            ToWorker::CancelHandover => Ok(FromWorker::Done),
            ToWorker::TakeOver { unread, state } => {
                self.take_over(&unread, &state, descriptors).map(|()| FromWorker::Serving)
            }
            // The callers handle the last five.
            ToWorker::Start(_)
            | ToWorker::Refuse(_)
            | ToWorker::Adopt { .. }
            | ToWorker::Stop
            | ToWorker::RefreshSize
            | ToWorker::Resize { .. }
            | ToWorker::PrepareHandover
            | ToWorker::OfferHandover { .. } => {
                let message = "only the first message on a channel can be start, refuse or adopt";
                Err(Error::new(ErrorKind::InvalidArgument, message))
            }
        }
    }
}

impl Session {
    /// Passes the present content of the credential files to the backend.
    fn renew_credentials(&self, paths: &[String], descriptors: Vec<OwnedFd>) -> Result<()> {
        let renewal = self.image.renew_credentials().ok_or_else(|| {
            let message = "this kind of volume cannot renew its credentials";
            Error::new(ErrorKind::Unsupported, message)
        })?;
        let credentials = CredentialSet::receive(&self.credential_files, paths, descriptors)?;
        renewal.renew(&credentials)?;
        tracing::info!("the credentials are up to date");
        Ok(())
    }
}

/// Replaces the injected faults of a volume that can inject faults. The plan `break-in …` injects none: it tries
/// to break out of any worker.
#[cfg(feature = "fault")]
fn set_fault(image: &dyn Image, plan: &str) -> Result<()> {
    if let Some(targets) = plan.strip_prefix("break-in ") {
        return super::break_in::try_roads(targets);
    }
    let faults = image.set_fault().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "this volume injects no faults")
            .with_repair("map the volume as fault:URI")
    })?;
    faults.set_fault(plan)
}
