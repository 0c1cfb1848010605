//! Leader election: of several controllers only the one that holds a Lease works. The protocol is that of
//! client-go: a candidate takes the Lease over if it has not changed for its duration, measured on the
//! candidate's own clock from the time at which the candidate has first seen that state.
//!
//! The Lease saves work; it proves nothing. A leader that was paused can act after another one has taken over.
//! Each of its writes is conditional on the resourceVersion that it has read, and a fence at the storage does
//! nothing if the record is ahead.

use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::api::{self, call};

/// The times of an election. A leader that dies without releasing the Lease is replaced after
/// The times of an election. A leader that dies without releasing the Lease is replaced after `duration + retry`, and two
/// seconds later if an attempt of the next one gets no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How long a Lease that does not change is valid.
    pub duration: Duration,
    /// How long a leader that cannot renew the Lease goes on.
    pub renew_deadline: Duration,
    /// The time between two attempts to take or to renew the Lease.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { duration: seconds(10), renew_deadline: seconds(7), retry: seconds(2) }
    }
}

/// How long a candidate waits for one attempt to take the Lease: the connection may be dead, and another attempt uses
/// another one.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(4);

/// A candidate.
pub(crate) struct Election {
    leases: Api<Lease>,
    name: String,
    identity: String,
    timing: Timing,
    /// The last state of the Lease, and when this process has first seen it.
    seen: Option<(LeaseSpec, Instant)>,
}

/// What a candidate does about the Lease.
#[derive(Debug, Clone, PartialEq)]
enum Attempt {
    Create(LeaseSpec),
    Take(LeaseSpec),
    /// Another controller holds it.
    Wait,
}

impl Election {
    pub(crate) fn new(leases: Api<Lease>, name: &str, identity: &str, timing: Timing) -> Self {
        let (name, identity) = (name.to_owned(), identity.to_owned());
        Self { leases, name, identity, timing, seen: None }
    }

    /// Waits until this process holds the Lease. Errors of the API server are logged, and it tries again.
    pub(crate) async fn acquire(&mut self) {
        let mut failed = false;
        loop {
            let next = Instant::now() + self.timing.retry;
            let attempt = timeout(ATTEMPT_TIMEOUT, self.attempt()).await;
            match attempt.unwrap_or_else(|_| Err(no_answer())) {
                Ok(true) => return,
                Ok(false) => failed = false,
                // A conflict means that another candidate was faster.
                Err(error) if api::is_conflict(&error) => {}
                Err(error) if failed => tracing::debug!("{}", error.report()),
                Err(error) => {
                    failed = true;
                    tracing::warn!("{}; trying again", api::message(&error));
                }
            }
            sleep_until(next).await;
        }
    }

    /// Renews the Lease until it is lost, and returns the reason.
    pub(crate) async fn hold(&mut self) -> Error {
        let mut renewed = Instant::now();
        loop {
            sleep(self.timing.retry).await;
            let deadline = renewed + self.timing.renew_deadline;
            let attempt = tokio::time::timeout_at(deadline, self.attempt()).await;
            let now = Instant::now();
            match attempt {
                Ok(Ok(true)) => renewed = now,
                Ok(Ok(false)) => {
                    let message = "another controller has taken the lease over";
                    return Error::new(ErrorKind::Fenced, message);
                }
                Ok(Err(error)) if now < deadline => tracing::warn!("{}", error.report()),
                Ok(Err(error)) => return error,
                Err(_) => return no_answer(),
            }
        }
    }

    /// Gives the Lease up, so that the next leader need not wait. An error is only logged: the Lease expires.
    pub(crate) async fn release(&mut self) {
        if let Err(error) = self.try_release().await {
            tracing::debug!("{}", error.report());
        }
    }

    async fn try_release(&self) -> Result<()> {
        let mut lease = call(|| self.cannot("read"), self.leases.get(&self.name)).await?;
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() == Some(&self.identity) {
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
            let parameters = PostParams::default();
            let request = self.leases.replace(&self.name, &parameters, &lease);
            call(|| self.cannot("release"), request).await?;
        }
        Ok(())
    }

    /// Takes or renews the Lease. Returns whether this process holds it.
    async fn attempt(&mut self) -> Result<bool> {
        let known = call(|| self.cannot("read"), self.leases.get_opt(&self.name)).await?;
        let spec = known.as_ref().and_then(|lease| lease.spec.clone());
        let now = Instant::now();
        if self.seen.as_ref().map(|(seen, _)| seen) != spec.as_ref() {
            self.seen = spec.clone().map(|spec| (spec, now));
        }
        let since = self.seen.as_ref().map_or(now, |(_, since)| *since);
        let wanted = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.timing.duration.as_secs()).ok(),
            renew_time: Some(MicroTime(api::timestamp())),
            ..LeaseSpec::default()
        };
        let parameters = PostParams::default();
        let written = match decide(spec.as_ref(), wanted, now - since) {
            Attempt::Wait => return Ok(false),
            Attempt::Create(spec) => {
                let name = Some(self.name.clone());
                let metadata = ObjectMeta { name, ..ObjectMeta::default() };
                let lease = known.unwrap_or(Lease { metadata, spec: None });
                let is_new = lease.metadata.resource_version.is_none();
                let lease = Lease { spec: Some(spec), ..lease };
                if is_new {
                    call(|| self.cannot("create"), self.leases.create(&parameters, &lease)).await?
                } else {
                    let request = self.leases.replace(&self.name, &parameters, &lease);
                    call(|| self.cannot("take"), request).await?
                }
            }
            Attempt::Take(spec) => {
                let lease = Lease { spec: Some(spec), ..known.unwrap_or_default() };
                let request = self.leases.replace(&self.name, &parameters, &lease);
                call(|| self.cannot("take"), request).await?
            }
        };
        self.seen = written.spec.map(|spec| (spec, Instant::now()));
        Ok(true)
    }

    fn cannot(&self, act: &str) -> String {
        format!("cannot {act} the lease {}", self.name)
    }
}

fn no_answer() -> Error {
    let message = "cannot take or renew the lease: the API server did not answer in time";
    Error::new(ErrorKind::TimedOut, message)
}

/// Decides what to do about a Lease that has not changed for `unchanged`.
fn decide(known: Option<&LeaseSpec>, wanted: LeaseSpec, unchanged: Duration) -> Attempt {
    let Some(known) = known else {
        let acquire_time = wanted.renew_time.clone();
        return Attempt::Create(LeaseSpec { acquire_time, lease_transitions: Some(0), ..wanted });
    };
    let holder = known.holder_identity.as_deref().filter(|holder| !holder.is_empty());
    if holder == wanted.holder_identity.as_deref() {
        let LeaseSpec { acquire_time, lease_transitions, .. } = known.clone();
        return Attempt::Take(LeaseSpec { acquire_time, lease_transitions, ..wanted });
    }
    let duration = known.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    let is_valid = unchanged < Duration::from_secs(duration.unwrap_or_default());
    if holder.is_some() && is_valid {
        return Attempt::Wait;
    }
    let transitions = known.lease_transitions.unwrap_or_default().saturating_add(1);
    let acquire_time = wanted.renew_time.clone();
    Attempt::Take(LeaseSpec { acquire_time, lease_transitions: Some(transitions), ..wanted })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hyper::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    fn wanted(holder: &str) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: Some(10),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn a_lease_is_taken_over_when_it_has_not_changed_for_its_duration() {
        let held = LeaseSpec { lease_transitions: Some(4), ..wanted("a") };
        let seconds = Duration::from_secs;
        assert_eq!(decide(Some(&held), wanted("b"), seconds(9)), Attempt::Wait);
        let Attempt::Take(taken) = decide(Some(&held), wanted("b"), seconds(10)) else { panic!() };
        assert_eq!(
            (taken.holder_identity.as_deref(), taken.lease_transitions),
            (Some("b"), Some(5))
        );
    }

    #[test]
    fn the_holder_renews_and_a_released_lease_is_free() {
        let held = LeaseSpec { lease_transitions: Some(4), ..wanted("a") };
        let Attempt::Take(renewed) = decide(Some(&held), wanted("a"), Duration::ZERO) else {
            panic!()
        };
        assert_eq!(renewed.lease_transitions, Some(4));
        let free = LeaseSpec { holder_identity: None, ..held };
        assert!(matches!(decide(Some(&free), wanted("b"), Duration::ZERO), Attempt::Take(_)));
        assert!(matches!(decide(None, wanted("b"), Duration::ZERO), Attempt::Create(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_without_an_answer_does_not_keep_a_candidate_from_the_next_one() {
        let asked = Arc::new(AtomicUsize::new(0));
        let requests = Arc::clone(&asked);
        let service = tower::service_fn(move |request: Request<Body>| {
            let number = requests.fetch_add(1, Ordering::Relaxed);
            let lease = json!({ "metadata": {}, "spec": { "holderIdentity": "a" } });
            let is_read = request.method() == "GET";
            let missing = json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "not found", "reason": "NotFound", "code": 404,
            });
            let (code, answer) = if is_read { (404, missing) } else { (201, lease) };
            async move {
                if number == 0 {
                    std::future::pending::<()>().await;
                }
                Response::builder().status(code).body(Body::from(answer.to_string().into_bytes()))
            }
        });
        let leases = Api::namespaced(Client::new(service, "default"), "default");
        let mut election = Election::new(leases, "lease", "a", Timing::default());
        let begun = Instant::now();
        election.acquire().await;
        assert_eq!(asked.load(Ordering::Relaxed), 3);
        assert_eq!(begun.elapsed(), ATTEMPT_TIMEOUT);
    }

    #[test]
    fn the_default_times_replace_a_dead_leader_within_15_s() {
        let Timing { duration, renew_deadline, retry } = Timing::default();
        // The one attempt that does not end may begin just before the lease expires.
        assert!(duration + retry.max(ATTEMPT_TIMEOUT) < Duration::from_secs(15));
        assert!(
            renew_deadline + retry <= duration,
            "an old leader stops before the next one starts"
        );
    }
}
