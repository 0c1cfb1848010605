//! Calls to the kernel off the event loop: each on a thread that may be given up, never more than
//! so many at a time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, sleep, timeout_at};

use crate::blocking::spawn;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{ConnectSpec, DeviceIndex, Identity, Kernel};

/// The kernel, from the event loop.
pub(crate) struct KernelCalls {
    kernel: Arc<dyn Kernel>,
    commands: Slots,
    waits: Slots,
}

/// Room for so many calls.
#[derive(Clone)]
struct Slots {
    permits: Arc<Semaphore>,
    most: usize,
}

impl Slots {
    fn new(most: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(most)), most }
    }

    fn used(&self) -> usize {
        self.most - self.permits.available_permits()
    }
}

/// How much the kernel has to do for us.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    /// Commands under way.
    pub commands: usize,
    /// Calls that wait for something.
    pub waits: usize,
    /// Those that nobody waits for any more.
    pub stuck: usize,
}

/// Commands that may be under way, stuck ones included.
pub(crate) const MAX_COMMANDS: usize = 12;

/// Calls that wait for udev, for a flush or for a disconnect.
pub(crate) const MAX_WAITS: usize = 36;

/// As both, for looks at the devices and for what is done by force.
pub(crate) const MAX_URGENT: usize = 16;

/// For one command, once it is its turn.
pub(crate) const COMMAND_LIMIT: Duration = Duration::from_secs(10);

/// Beyond its own deadline a call gets so much more before its thread is given up.
const SLACK: Duration = Duration::from_millis(500);

impl KernelCalls {
    /// Calls to `kernel`.
    pub(crate) fn new(kernel: Arc<dyn Kernel>) -> Self {
        Self { kernel, commands: Slots::new(MAX_COMMANDS), waits: Slots::new(MAX_WAITS) }
    }

    /// Calls to the same kernel that never wait behind others.
    pub(crate) fn urgent(&self) -> Self {
        let slots = Slots::new(MAX_URGENT);
        Self { kernel: Arc::clone(&self.kernel), commands: slots.clone(), waits: slots }
    }

    /// The kernel itself, for calls that may block the caller.
    pub(crate) fn kernel(&self) -> &Arc<dyn Kernel> {
        &self.kernel
    }

    /// Waits until no call is under way, stuck ones included: those that were given up have a thread
    /// in the kernel and no place here. Says whether that came about.
    pub(crate) async fn wait_until_idle(&self, deadline: Instant) -> bool {
        let all = |slots: &Slots| u32::try_from(slots.most).unwrap_or(u32::MAX);
        let quiet = async {
            // Those that come meanwhile wait behind this.
            drop(self.commands.permits.acquire_many(all(&self.commands)).await);
            drop(self.waits.permits.acquire_many(all(&self.waits)).await);
            while self.kernel.stuck() > 0 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout_at(deadline, quiet).await.is_ok()
    }

    /// What is under way now.
    pub(crate) fn load(&self) -> Load {
        Load {
            commands: self.commands.used(),
            waits: self.waits.used(),
            stuck: self.kernel.stuck(),
        }
    }

    /// A call that should return soon. Its turn may come as late as `deadline`; from there on it
    /// has [`COMMAND_LIMIT`].
    ///
    /// # Errors
    /// The call's; `TimedOut` when it has not returned in time: it may still take effect.
    pub(crate) async fn command<T: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        call: impl FnOnce(&dyn Kernel) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.run(&self.commands, what, deadline, Some(COMMAND_LIMIT), |kernel, _| call(kernel))
            .await
    }

    /// Connects a device. One that comes only after nobody waits for it any more is disconnected.
    /// `turn` is kept until the kernel has ended all of it.
    ///
    /// # Errors
    /// As [`KernelCalls::command`].
    pub(crate) async fn connect(
        &self,
        spec: ConnectSpec,
        turn: impl Send + 'static,
        deadline: Instant,
    ) -> Result<DeviceIndex> {
        let (sender, mut receiver) = oneshot::channel();
        let identity = spec.identity.clone();
        let call = move |kernel: &dyn Kernel| {
            let _turn = turn;
            let index = kernel.connect(spec)?;
            if sender.send(index).is_err() {
                tracing::warn!(index, "a device came too late: disconnecting it");
                let until = (Instant::now() + COMMAND_LIMIT).into_std();
                kernel.disconnect(index, &identity, until)?;
            }
            Ok(())
        };
        let connected = self.command("connect a device", deadline, call).await;
        // From here on it is too late; until here, it is not.
        receiver.close();
        match (receiver.try_recv(), connected) {
            (Ok(index), _) => Ok(index),
            (Err(_), Err(error)) => Err(error),
            (Err(_), Ok(())) => Err(Error::new(ErrorKind::Internal, "no device was connected")),
        }
    }

    /// Freezes what is mounted from a device. What nobody waits for any more is not begun, or undone.
    ///
    /// # Errors
    /// As [`KernelCalls::wait`].
    pub(crate) async fn freeze(
        &self,
        index: DeviceIndex,
        identity: Identity,
        deadline: Instant,
    ) -> Result<Vec<String>> {
        let (sender, mut receiver) = oneshot::channel();
        let call = move |kernel: &dyn Kernel, until| {
            if sender.is_closed() {
                return Ok(());
            }
            let spared = kernel.freeze(index, &identity, until)?;
            if let Err(spared) = sender.send(spared) {
                tracing::warn!(index, "frozen too late: thawing it");
                let until = (Instant::now() + COMMAND_LIMIT).into_std();
                kernel.thaw(index, &identity, &spared, until)?;
            }
            Ok(())
        };
        let frozen = self.wait("freeze the file systems", deadline, None, call).await;
        // From here on it is too late; until here, it is not.
        receiver.close();
        match (receiver.try_recv(), frozen) {
            (Ok(spared), _) => Ok(spared),
            (Err(_), Err(error)) => Err(error),
            (Err(_), Ok(())) => Err(Error::new(ErrorKind::TimedOut, "nothing was frozen in time")),
        }
    }

    /// A call that waits for something, until the moment that it is given: `deadline`, or `limit`
    /// after its turn has come.
    ///
    /// # Errors
    /// As [`KernelCalls::command`].
    pub(crate) async fn wait<T: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        limit: Option<Duration>,
        call: impl FnOnce(&dyn Kernel, std::time::Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.run(&self.waits, what, deadline, limit, call).await
    }

    async fn run<T: Send + 'static>(
        &self,
        slots: &Slots,
        what: &'static str,
        deadline: Instant,
        limit: Option<Duration>,
        call: impl FnOnce(&dyn Kernel, std::time::Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let late = |message: String| Error::new(ErrorKind::TimedOut, message);
        let permit = timeout_at(deadline, Arc::clone(&slots.permits).acquire_owned())
            .await
            .map_err(|_| late(format!("could not {what}: earlier kernel calls are stuck")))?
            .map_err(|_| Error::new(ErrorKind::Unavailable, "the daemon is shutting down"))?;
        let deadline = limit.map_or(deadline, |limit| deadline.min(Instant::now() + limit));
        let kernel = Arc::clone(&self.kernel);
        let thread = spawn(what, move || {
            // Kept until the call returns, however long nobody waits for it any more.
            let _permit = permit;
            call(kernel.as_ref(), deadline.into_std())
        });
        match timeout_at(deadline + SLACK, thread).await {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => {
                Err(Error::new(ErrorKind::Internal, format!("could not {what}")).with_source(panic))
            }
            Err(_) => Err(late(format!("could not {what}: the kernel has not answered in time"))
                .with_repair("see the kernel's log; the command may still take effect")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_kernel::Identity;
    use cleat_kernel::sim::{Call, Fault, Script, SimKernel};

    fn spec() -> ConnectSpec {
        let (kernel_end, _) = std::os::unix::net::UnixStream::pair().unwrap();
        ConnectSpec {
            sockets: vec![kernel_end.into()],
            size: 1 << 20,
            block_size: 512,
            transmission_flags: 1,
            identity: Identity::new("00c1ea70", "v"),
            dead_connection_timeout: Duration::from_secs(1),
            request_timeout: Duration::ZERO,
            replay_delay: None,
        }
    }

    #[tokio::test]
    async fn a_device_that_comes_too_late_does_not_stay() {
        let kernel = SimKernel::new(Script::default());
        let calls = KernelCalls::new(Arc::new(kernel.clone()));
        kernel.inject(Call::Connect, Fault::Slow(SLACK + Duration::from_millis(300)));
        let error = calls.connect(spec(), (), Instant::now()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        // The late call ends with its thread, which holds the permit.
        assert!(!calls.wait_until_idle(Instant::now()).await);
        assert!(calls.wait_until_idle(Instant::now() + COMMAND_LIMIT).await);
        assert!(kernel.devices().unwrap().iter().all(|device| !device.connected));
    }

    #[tokio::test]
    async fn a_call_that_was_given_up_is_not_at_rest() {
        let kernel = SimKernel::new(Script::default());
        let calls = KernelCalls::new(Arc::new(kernel.clone()));
        for calls in [&calls, &calls.urgent()] {
            kernel.set_stuck(1);
            assert!(!calls.wait_until_idle(Instant::now() + Duration::from_millis(50)).await);
            kernel.set_stuck(0);
            assert!(calls.wait_until_idle(Instant::now() + COMMAND_LIMIT).await);
        }
    }

    #[tokio::test]
    async fn a_device_that_comes_in_time_stays() {
        let kernel = SimKernel::new(Script::default());
        let calls = KernelCalls::new(Arc::new(kernel.clone()));
        let index = calls.connect(spec(), (), Instant::now() + COMMAND_LIMIT).await.unwrap();
        assert!(kernel.devices().unwrap().iter().any(|d| d.index == index && d.connected));
    }
}
