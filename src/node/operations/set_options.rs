//! Changes the options of a mapping while it works.

use tokio::time::Instant;

use crate::context::Context;
use crate::credentials::{OpenCredentials, open_credentials};
use crate::mapping::View;
use crate::records::store;
use crate::status::publish;
use crate::target::{get, lock_mapped, not_mapped};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy;
use cleat_worker_protocol::protocol::ToWorker;

/// Replaces the faults that a `fault:` volume injects.
///
/// # Errors
/// Returns `Unsupported` for any other volume.
#[cfg(feature = "fault")]
pub(crate) async fn set_fault(
    cx: &Context,
    target: &str,
    plan: &str,
    deadline: Instant,
) -> Result<()> {
    let mapping = get(cx, target, deadline).await?;
    let guard = lock_mapped(&mapping, deadline).await?;
    let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(&mapping))?;
    let command = ToWorker::SetFault { plan: plan.to_owned() };
    mapping.until_forced(worker.call(command, Vec::new(), deadline)).await.map(|_| ())
}

/// Passes the present content of the volume's credential files to the worker. Nothing is recorded: each new
/// worker gets the files as they are when it starts.
///
/// # Errors
/// Returns `Unsupported` if the volume names no credential files, or if only a new worker can use the new
/// content; the errors of opening the files; and those of the worker.
pub(crate) async fn renew_credentials(
    cx: &Context,
    target: &str,
    deadline: Instant,
) -> Result<View> {
    let mapping = get(cx, target, deadline).await?;
    let guard = lock_mapped(&mapping, deadline).await?;
    let opening = open_credentials(cx, &guard.record.uri, deadline);
    let OpenCredentials { paths: credentials, descriptors, .. } =
        mapping.until_forced(opening).await?;
    if credentials.is_empty() {
        let message = format!("the volume of {} names no credential files", mapping.name);
        return Err(Error::new(ErrorKind::Unsupported, message)
            .with_repair("map it with options that name them, such as keyring=PATH"));
    }
    let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(&mapping))?;
    let call = worker.call(ToWorker::RenewCredentials { credentials }, descriptors, deadline);
    mapping.until_forced(call).await?;
    Ok(mapping.view())
}

/// Changes the behaviour in an outage of the backend, and the rate limits. The change is recorded also if
/// the mapping has no worker; the next worker gets it.
///
/// # Errors
/// Returns `InvalidArgument` for an empty change, and errors of the journal and of the worker.
pub(crate) async fn set_policy(
    cx: &Context,
    target: &str,
    change: policy::Change,
    deadline: Instant,
) -> Result<View> {
    if change.is_empty() {
        return Err(Error::new(ErrorKind::InvalidArgument, "no option to change was given")
            .with_repair("see: cleat set --help"));
    }
    let mapping = get(cx, target, deadline).await?;
    let mut guard = lock_mapped(&mapping, deadline).await?;
    let before = guard.record.options.policy;
    let policy = change.apply(before);
    guard.record.options.policy = policy;
    if let Err(error) = mapping.until_forced(store(cx, &guard)).await {
        guard.record.options.policy = before;
        return Err(error);
    }
    let record = guard.record.clone();
    publish(cx, &mapping, |view| view.record = record);
    tracing::info!(mapping = mapping.name, ?policy, "the policy was changed");
    if let Some(worker) = guard.worker.as_ref().filter(|worker| !worker.has_ended()) {
        let call = worker.call(ToWorker::SetPolicy(policy), Vec::new(), deadline);
        mapping.until_forced(call).await?;
    }
    Ok(mapping.view())
}
