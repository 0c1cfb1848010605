//! Passes credentials that have changed to the workers that use them, without a command: a file that was replaced, or
//! temporary keys that end soon. A worker never opens the files itself, so the supervisor looks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::context::Context;
use crate::credentials::{OpenCredentials, open_for_check};
use crate::mapping::Mapping;
use crate::planner::State;
use cleat_backend::{CredentialFile, CredentialVersion};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::protocol::ToWorker;

/// The interval between two checks of a mapping.
const INTERVAL: Duration = Duration::from_secs(5);

/// The timeout for the answer of a worker, which makes a new client of the store.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// The name of the service, for the health check.
const SERVICE: &str = "credentials";

/// What a worker got last.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Passed {
    worker_pid: u32,
    versions: Vec<CredentialVersion>,
}

/// What is known of the credentials of a mapping.
#[derive(Debug, Default)]
struct Known {
    passed: Option<Passed>,
    /// Why the last check failed, and what to do.
    problem: Option<(String, String)>,
}

/// Checks the mappings whose backend follows its credential files, until the daemon ends. The first check of a worker
/// passes them in any case: they may have changed since the worker got them. A check that hangs stays the only one
/// of its mapping.
pub(crate) async fn renew_credentials(cx: Arc<Context>) {
    let mut tick = interval(INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut known: BTreeMap<String, Known> = BTreeMap::new();
    let (mut checks, mut running) = (JoinSet::new(), BTreeSet::new());
    loop {
        tokio::select! {
            _ = tick.tick() => {
                let mappings = cx.register.all();
                known.retain(|id, _| mappings.iter().any(|mapping| mapping.mapping_id == *id));
                report(&cx, &known);
                for mapping in mappings {
                    let files = followed(&cx, &mapping);
                    if files.is_empty() || !running.insert(mapping.mapping_id.clone()) {
                        continue;
                    }
                    let known = known.get(&mapping.mapping_id);
                    let passed = known.and_then(|known| known.passed.clone());
                    let cx = Arc::clone(&cx);
                    checks.spawn(async move {
                        let checked = check(&cx, &mapping, files, passed).await;
                        (mapping, checked)
                    });
                }
            }
            Some(Ok((mapping, checked))) = checks.join_next() => {
                running.remove(&mapping.mapping_id);
                note(known.entry(mapping.mapping_id.clone()).or_default(), &mapping, checked);
                report(&cx, &known);
            }
        }
    }
}

/// Returns the credential files of a mapping that works; none if its backend follows none of them.
fn followed(cx: &Context, mapping: &Mapping) -> Vec<CredentialFile> {
    let view = mapping.view();
    let volume = (view.state == State::Mapped).then(|| cx.registry.volume(&view.record.uri));
    let files = match volume {
        Some(Ok(uri)) => uri.spec().credential_files(),
        _ => Vec::new(),
    };
    if files.iter().any(|file| file.is_followed) { files } else { Vec::new() }
}

/// Passes the files to the worker if it has others. Returns what it has then, and `None` if it cannot be asked now.
async fn check(
    cx: &Context,
    mapping: &Arc<Mapping>,
    files: Vec<CredentialFile>,
    passed: Option<Passed>,
) -> Result<Option<Passed>> {
    let OpenCredentials { paths, descriptors, versions } = open_for_check(cx, files).await?;
    let worker_pid = mapping.view().worker_pid;
    if passed.as_ref().is_some_and(|it| it.worker_pid == worker_pid && it.versions == versions) {
        return Ok(passed);
    }
    let Some(guard) = mapping.try_lock_in_background() else { return Ok(None) };
    let Some(worker) = guard.worker.as_ref().filter(|worker| !worker.has_ended()) else {
        return Ok(None);
    };
    let worker_pid = worker.id().pid;
    let command = ToWorker::RenewCredentials { credentials: paths };
    let call = worker.call(command, descriptors, Instant::now() + ANSWER_TIMEOUT);
    mapping.until_forced(call).await?;
    if passed.is_some_and(|passed| passed.worker_pid == worker_pid) {
        tracing::info!(mapping = mapping.name, "the worker has the new credentials");
    }
    Ok(Some(Passed { worker_pid, versions }))
}

/// Notes the result of a check, and logs a problem when it begins.
fn note(known: &mut Known, mapping: &Mapping, checked: Result<Option<Passed>>) {
    let error = match checked {
        Ok(passed) => {
            known.passed = passed.or(known.passed.take());
            known.problem = None;
            return;
        }
        Err(error) => error,
    };
    let message = format!("{} keeps its present credentials: {}", mapping.name, error.report());
    let repair = error.repair().unwrap_or("see the log of the daemon");
    if known.problem.as_ref().is_none_or(|(before, _)| *before != message) {
        tracing::warn!(mapping = mapping.name, "{message}; {repair}");
    }
    known.problem = Some((message, repair.to_owned()));
}

/// Shows the first problem in the health check.
fn report(cx: &Context, known: &BTreeMap<String, Known>) {
    let problem = known.values().find_map(|known| known.problem.as_ref());
    let error = problem
        .map(|(message, repair)| Error::new(ErrorKind::Unavailable, message).with_repair(repair));
    cx.report_service(SERVICE, error);
}
