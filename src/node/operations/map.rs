//! Maps a volume.

use std::time::Duration;

use tokio::time::Instant;

use crate::api::validate;
use crate::context::Context;
use crate::devices::orphans;
use crate::mapping::{Change, Guard, Mapping, View};
use crate::naming::{check_new_name, other_volume};
use crate::planner::{Intent, Options, Record, State};
use crate::reconcile::{reconcile_with_retries, take_down};
use crate::retry::{after_failure, wake_later};
use crate::status::publish_failure;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy;

/// A validated request to map a volume.
#[derive(Debug, Clone)]
pub struct MapSpec {
    /// The name of the mapping.
    pub name: String,
    /// The URI of the volume.
    pub uri: String,
    /// Whether the device refuses writes.
    pub read_only: bool,
    /// The number of connections; 0 for that of the existing mapping, or the default.
    pub connections: u32,
    /// The block size in bytes; 0 as above.
    pub block_size: u32,
    /// How long I/O waits for a worker, in seconds; 0 as above.
    pub dead_connection_timeout_s: u32,
    /// The differences from the default policy.
    pub policy: policy::Change,
    /// Whether to take the volume from its present owner.
    pub take_over: bool,
    /// Whether the device is quiesced for snapshots.
    pub quiesce: bool,
    /// The generation of the grant with which the volume is claimed; 0 without a grant.
    pub grant: u64,
}

impl MapSpec {
    /// Checks the options.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if one of them is out of range.
    pub fn check(&self) -> Result<()> {
        validate::uri(&self.uri)?;
        validate::name(&self.name)?;
        validate::connections(self.connections)?;
        validate::block_size(self.block_size)?;
        validate::timeout_s(self.dead_connection_timeout_s)?;
        validate::quiesce(self.quiesce, self.read_only)?;
        self.policy.apply(policy::Policy::default()).limits.check().map(drop)
    }
}

/// The number of attempts to find or insert a mapping that is removed meanwhile.
const MAX_ATTEMPTS: u32 = 8;

/// The timeout for undoing a failed map.
pub(crate) const UNDO_TIMEOUT: Duration = Duration::from_secs(20);

/// Maps a volume, or returns the mapping that is there already.
///
/// # Errors
/// Returns the error of the step that failed. Nothing is left of the mapping then, unless the error says
/// otherwise.
pub(crate) async fn map(cx: &Context, spec: &MapSpec, deadline: Instant) -> Result<View> {
    check_unmanaged(cx, &spec.name, deadline).await?;
    if cx.register.get(&spec.name).is_none() {
        check_new_name(&spec.name)?;
    }
    for _ in 0..MAX_ATTEMPTS {
        let make = || Mapping::new(new_record(cx, spec), cx.work_queue.clone());
        let limit = cx.settings.mappings;
        let (mapping, fresh) = cx.register.find_or_insert(&spec.name, limit, make)?;
        if let Some(mut guard) = fresh {
            guard.take_over = spec.take_over;
            return mapping.until_forced(map_new(cx, guard, deadline)).await;
        }
        let guard = mapping.lock_for_call(deadline).await?;
        if !guard.teardown.removed {
            return mapping.until_forced(map_existing(cx, guard, spec, deadline)).await;
        }
    }
    Err(Error::new(
        ErrorKind::Aborted,
        format!("cannot map {}: other calls keep removing it", spec.name),
    ))
}

/// Checks that no record that this daemon leaves in place, and no device of such a record, has the name `name`.
async fn check_unmanaged(cx: &Context, name: &str, deadline: Instant) -> Result<()> {
    cx.unmanaged.check_name(name)?;
    if cx.unmanaged.ids().is_empty() {
        return Ok(());
    }
    // The name in a record that cannot be read is known only from its device.
    let orphans = orphans(cx, deadline).await?;
    let mut named = orphans.iter().filter(|(_, identity)| identity.name() == name);
    named.try_for_each(|(_, identity)| cx.unmanaged.check_device(identity))
}

async fn map_new(cx: &Context, mut guard: Guard, deadline: Instant) -> Result<View> {
    let _ = cx.changes.send(Change { view: guard.mapping().view(), removed: false });
    let error = match reconcile_with_retries(cx, &mut guard, deadline).await {
        Ok(State::Mapped) => {
            tracing::info!(mapping = guard.mapping().name, "mapped");
            guard.take_over = false;
            return Ok(guard.mapping().view());
        }
        Ok(State::Failed(failure)) => failure.into_error(),
        Ok(other) => unexpected_state(&guard.record.name, &other),
        Err(error) => error,
    };
    tracing::warn!(mapping = guard.mapping().name, "map failed: {}", error.report());
    guard.record.intent = Intent::Unmapped;
    match take_down(cx, &mut guard, Instant::now() + UNDO_TIMEOUT).await {
        Ok(()) => Err(error),
        Err(undo) => {
            let message = format!("{}; undoing it failed: {}", error.report(), undo.report());
            publish_failure(cx, &guard, &Error::new(undo.kind(), message.clone()));
            wake_later(cx, &mut guard);
            let error = Error::new(error.kind(), message);
            Err(error.with_repair(format!("cleat unmap {}", guard.mapping().name)))
        }
    }
}

async fn map_existing(
    cx: &Context,
    mut guard: Guard,
    spec: &MapSpec,
    deadline: Instant,
) -> Result<View> {
    if let Some(difference) = difference(&guard.record, spec) {
        let message = format!("{} is mapped already, with {difference}", spec.name);
        return Err(Error::new(ErrorKind::AlreadyExists, message)
            .with_repair("choose another name (--name), or unmap it first (cleat unmap)"));
    }
    if guard.record.intent != Intent::Mapped {
        let message = format!("{} is being unmapped", spec.name);
        return Err(Error::new(ErrorKind::Aborted, message));
    }
    // An explicit retry resets the failure count.
    guard.health.failures = 0;
    guard.health.retry_at = None;
    guard.take_over = spec.take_over;
    let converged = reconcile_with_retries(cx, &mut guard, deadline).await;
    // The permission holds only for this call.
    guard.take_over = false;
    match converged {
        Ok(State::Mapped) => Ok(guard.mapping().view()),
        Ok(State::Failed(failure)) => Err(failure.into_error()),
        Ok(other) => Err(unexpected_state(&spec.name, &other)),
        Err(error) => {
            after_failure(cx, &mut guard, &error);
            Err(error)
        }
    }
}

fn unexpected_state(name: &str, state: &State) -> Error {
    let message = format!("internal: reconcile of mapping {name} ended in state {state:?}");
    Error::new(ErrorKind::Internal, message)
}

pub(super) fn new_record(cx: &Context, spec: &MapSpec) -> Record {
    let defaults = &cx.settings.defaults;
    let or = |value: u32, default: u32| if value == 0 { default } else { value };
    let connections = or(spec.connections, defaults.connections);
    Record {
        version: Record::VERSION,
        mapping_id: format!("{:016x}", cx.random.next()),
        name: spec.name.clone(),
        uri: spec.uri.clone(),
        grant: spec.grant,
        options: Options {
            read_only: spec.read_only,
            connections,
            block_size: or(spec.block_size, defaults.block_size),
            dead_connection_timeout_s: or(
                spec.dead_connection_timeout_s,
                defaults.dead_connection_timeout_s,
            ),
            // With several connections, a short delay makes the kernel drop live sockets under load.
            replay_delay_ms: if connections == 1 { defaults.replay_delay_ms } else { 0 },
            policy: spec.policy.apply(defaults.policy),
            quiesce: spec.quiesce,
        },
        intent: Intent::Mapped,
        generation: 0,
        revision: 0,
        worker: None,
        predecessor: None,
        volume: None,
        established: false,
        fenced: false,
        sync_failed: false,
        replaced: None,
        quiesced: None,
        created_at_s: cx.clock.unix_s(),
        boot_id: cx.settings.boot_id.clone(),
    }
}

/// Returns the first difference between a mapping and a request for its name.
pub(super) fn difference(record: &Record, spec: &MapSpec) -> Option<String> {
    let options = &record.options;
    let differs = |asked: u32, is: u32| asked != 0 && asked != is;
    if let Some(other) = other_volume(record, &spec.uri) {
        Some(other)
    } else if record.grant != spec.grant {
        Some(format!("generation {} of its grant", record.grant))
    } else if options.read_only != spec.read_only {
        Some(if options.read_only { "read_only=true" } else { "read_only=false" }.to_owned())
    } else if differs(spec.connections, options.connections) {
        Some(format!("connections={}", options.connections))
    } else if differs(
        spec.block_size,
        record.volume.as_ref().map_or(options.block_size, |volume| volume.block_size),
    ) {
        Some("another block size".to_owned())
    } else if differs(spec.dead_connection_timeout_s, options.dead_connection_timeout_s) {
        Some(format!("dead_connection_timeout={}s", options.dead_connection_timeout_s))
    } else if options.quiesce != spec.quiesce {
        Some(format!("quiesce={}", options.quiesce))
    } else if spec.policy.apply(options.policy) != options.policy {
        Some("another outage policy or other limits (cleat set changes them)".to_owned())
    } else {
        None
    }
}
