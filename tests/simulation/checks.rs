//! The invariants: after calls that succeeded or failed, and at the end, when no failure is active any
//! more. Each mapping works, or has been removed completely, or is reported with a true reason; and each
//! mapping can be unmapped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::Error;
use cleat_kernel::Device;
use cleat_node::executor::Executor;
use cleat_node::mapping::View;
use cleat_node::planner::{Failure, Intent, Record, State};
use tokio::time::{Instant, sleep};

use crate::clock;
use crate::disks::{SECTORS, key};
use crate::lives::Calm;
use crate::scenario::{Lasting, VolumePlan};
use crate::world::{StateDisk, World, cleat_devices};

/// The time limit of an unmap when no failure is active.
const UNMAP_LIMIT: Duration = Duration::from_secs(60);

/// The time limit of a request when no failure is active; retries over several connections take longest.
const IO_LIMIT: Duration = Duration::from_secs(90);

/// The time in which a worker without supervisor and device ends by itself.
const ORPHAN_LIMIT: Duration = Duration::from_secs(700);

/// Ends all failures except the lasting one.
pub(crate) fn end_faults(world: &World, volumes: &[VolumePlan], lasting: Option<Lasting>) {
    tracing::debug!(?lasting, "CALM");
    let kernel = world.kernel();
    kernel.clear_faults();
    kernel.lose_events(false);
    kernel.set_module(true);
    for device in kernel.show() {
        kernel.set_holders(device.index, Vec::new());
    }
    // The disk that was full has space again.
    for entry in std::fs::read_dir(world.records()).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "tmp") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    world.set_state_disk(StateDisk::Works, false);
    let mut state = world.state();
    state.quirks.clear();
    state.upgrading = None;
    for worker in state.workers.values_mut() {
        worker.end_faults(clock::now());
    }
    for disk in state.disks.values_mut() {
        (disk.gone, disk.hung) = (false, false);
    }
    drop(state);
    match lasting {
        Some(Lasting::Stopped(at)) => {
            let pid = world.worker_of(volumes[at].name);
            let mut state = world.state();
            if let Some(worker) = pid.and_then(|pid| state.workers.get_mut(&pid)) {
                (worker.stopped, worker.was_stopped) = (true, true);
            }
        }
        Some(Lasting::Gone(at)) => {
            if let Some(disk) = world.state().disks.get_mut(&volumes[at].uri) {
                disk.gone = true;
            }
        }
        Some(Lasting::Held(at)) => {
            for device in world.devices_of(volumes[at].name) {
                let holder = cleat_kernel::Holder::Process { pid: 4711, command: "dd".to_owned() };
                kernel.set_holders(device.index, vec![holder]);
            }
        }
        None => {}
    }
}

/// The ids and names in the journal, copies included.
pub(crate) fn records(world: &World) -> Vec<(String, String)> {
    world.recorded()
}

/// Checks the result of a `map` that succeeded.
pub(crate) fn after_map(world: &World, view: &View) {
    let id = &view.record.mapping_id;
    if !world.state().touched.contains(id) && !records(world).iter().any(|(known, _)| known == id) {
        world.violation(format!("{id} was mapped and is in no journal"));
    }
    let identity = view.record.identity();
    let devices = world.devices_of(&view.record.name);
    if !devices.iter().any(|device| device.identity().as_ref() == Some(&identity))
        && !world.kernel().has_vanished(&identity)
    {
        world.violation(format!("{id} was mapped and has no device"));
    }
}

/// The processes of a mapping.
pub(crate) fn processes(world: &World, id: &str) -> BTreeSet<u64> {
    let state = world.state();
    let own = state.workers.values().filter(|worker| worker.mapping_id() == Some(id));
    own.map(|worker| worker.id.started_ticks).collect()
}

/// Checks that the processes from before a completed handover have ended.
pub(crate) fn after_upgrade(world: &World, name: &str, before: &BTreeSet<u64>) {
    let state = world.state();
    let left = |w: &&crate::workers::Worker| before.contains(&w.id.started_ticks);
    let left: Vec<u32> = state.workers.values().filter(left).map(|w| w.id.pid).collect();
    drop(state);
    if !left.is_empty() {
        world.violation(format!("{name} was handed over and has the workers {left:?} still"));
    }
}

/// The names of control sockets.
fn sockets(world: &World) -> Vec<String> {
    let directory = world.config().runtime_dir.join("workers");
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The id of the mapping of a control socket.
fn mapping_of(socket: &str) -> &str {
    socket.split('.').next().unwrap_or(socket)
}

/// The ids of the devices and workers that exist for a name.
pub(crate) fn traces(world: &World, name: &str) -> BTreeSet<String> {
    let devices = world.devices_of(name);
    let of_devices =
        devices.iter().filter_map(Device::identity).map(|id| id.mapping_id().to_owned());
    let state = world.state();
    let starts = state.workers.values().filter_map(|worker| worker.start.as_ref());
    let of_workers = starts.filter(|s| s.name == name).map(|s| s.mapping_id.clone());
    of_devices.chain(of_workers).collect()
}

/// Checks that a `map` that failed has left nothing behind.
pub(crate) fn after_failed_map(
    world: &World,
    executor: &Executor,
    name: &str,
    before: &BTreeSet<String>,
    error: &Error,
) {
    if executor.register().get(name).is_some() {
        // Another call has mapped the same name.
        return;
    }
    let left: Vec<String> = traces(world, name).difference(before).cloned().collect();
    if !left.is_empty() {
        world.violation(format!("a failed map of {name} left {left:?}: {}", error.report()));
    }
}

/// Checks that an `unmap` that succeeded has left nothing behind.
pub(crate) fn after_unmap(world: &World, id: &str) {
    if cleat_devices(world.kernel()).iter().any(|d| is_of(d, id)) {
        world.violation(format!("{id} was unmapped and has a device"));
    }
    nothing_but_a_device(world, id);
}

fn nothing_but_a_device(world: &World, id: &str) {
    world.state().gone.insert(id.to_owned());
    let left = |what: &str| world.violation(format!("{id} was unmapped and has {what}"));
    if records(world).iter().any(|(known, _)| known == id) {
        left("a record");
    }
    if sockets(world).iter().any(|socket| mapping_of(socket) == id) {
        left("a control socket");
    }
    let alive = world.state().workers.values().any(|worker| worker.mapping_id() == Some(id));
    if alive {
        left("a worker");
    }
    nothing_is_frozen(world, Some(id), "unmapped");
}

/// Checks the state after a forced unmap that succeeded. A device that is held may stay.
pub(crate) fn after_force(world: &World, id: &str) {
    let held = |device: &Device| world.kernel().is_disconnected(device.index);
    let all = cleat_devices(world.kernel());
    let left: Vec<&Device> = all.iter().filter(|device| is_of(device, id)).collect();
    if left.iter().any(|device| !held(device)) {
        world.violation(format!("{id} was unmapped by force and has {left:?}"));
    }
    nothing_but_a_device(world, id);
}

fn is_of(device: &Device, id: &str) -> bool {
    device.identity().is_some_and(|identity| identity.mapping_id() == id)
}

/// Reads from all devices. The worker of an idle volume is pinged only every 5 minutes, so one that has stopped to answer
/// commands is noticed when its volume is used.
pub(crate) fn read_all(world: &World) {
    for device in cleat_devices(world.kernel()) {
        let id = device.identity().map(|identity| identity.mapping_id().to_owned());
        if id.is_some_and(|id| !world.is_busy_elsewhere(&id, 0)) {
            world.submit(&device, 0, false);
        }
    }
}

/// Checks the final state, after a long time without failures.
pub(crate) async fn at_the_end(
    world: &World,
    volumes: &[VolumePlan],
    Calm { lasting, by_force }: Calm,
    executor: &Arc<Executor>,
) {
    let lasting_name = |wanted: fn(&Lasting) -> Option<usize>| {
        lasting.as_ref().and_then(wanted).map(|at| volumes[at].name)
    };
    let gone = lasting_name(|l| if let Lasting::Gone(at) = l { Some(*at) } else { None });
    let held = lasting_name(|l| if let Lasting::Held(at) = l { Some(*at) } else { None });
    let stopped = lasting_name(|l| if let Lasting::Stopped(at) = l { Some(*at) } else { None });
    for volume in executor.register().all() {
        let view = volume.view();
        let name = view.record.name.as_str();
        tracing::debug!(name, state = ?view.state, message = view.message, "END");
        let right = match &view.state {
            State::Mapped => works(world, &view).await,
            State::Failed(failure) => holds(world, &view, failure, gone == Some(name)),
            State::Recovering => is_open_elsewhere_or(world, &view, gone == Some(name)),
            State::Held(_) if held == Some(name) => Ok(()),
            // The dirty data of the device cannot be written; the message says that only force removes it.
            State::Unmapping if stopped == Some(name) && view.message.contains("flush") => Ok(()),
            // The same without a worker that could flush it.
            State::Unmapping
                if ["cannot be flushed without a worker", "the claim of its volume"]
                    .iter()
                    .any(|reason| view.message.contains(reason)) =>
            {
                is_open_elsewhere_or(world, &view, gone == Some(name))
            }
            State::Held(_) | State::Mapping | State::Unmapping | State::Unmapped => {
                Err("is not at rest".to_owned())
            }
        };
        if let Err(why) = right {
            let (state, message) = (&view.state, &view.message);
            world.violation(format!("{name} at the end: {why}; {state:?} {message:?}"));
        }
    }
    nothing_is_frozen(world, None, "at the end");
    compare(world);
    reconnects_are_true(world, executor);
    everything_is_known(world, executor).await;
    if by_force {
        force_everything_down(world, executor).await;
    }
    end_faults(world, volumes, None);
    take_everything_down(world, executor).await;
    if !world.state().workers.is_empty() {
        // They are workers of mappings whose records were lost.
        sleep(ORPHAN_LIMIT).await;
    }
    for volume in volumes {
        if world.violations().is_empty() {
            map_again(world, volume, executor).await;
        }
    }
    nothing_is_left(world, executor);
}

/// Checks that a mapping in state mapped serves I/O.
async fn works(world: &World, view: &View) -> Result<(), String> {
    let id = &view.record.mapping_id;
    let all = cleat_devices(world.kernel());
    let devices: Vec<&Device> = all.iter().filter(|device| is_of(device, id)).collect();
    let [device] = devices.as_slice() else { return Err(format!("has devices {devices:?}")) };
    if view.device.map(|seen| (seen.index, seen.size)) != Some((device.index, device.size)) {
        return Err(format!("is shown as {:?}, is {device:?}", view.device));
    }
    let links = world.kernel().live_connections(device.index);
    if links != view.record.options.connections as usize {
        return Err(format!("has {links} connections"));
    }
    let serves = |w: &crate::workers::Worker| w.answers_commands() && w.mapping_id() == Some(id);
    if !world.state().workers.get(&view.worker_pid).is_some_and(serves) {
        return Err(format!("has no worker {}", view.worker_pid));
    }
    for writes in [!view.record.options.read_only, false] {
        for sector in 0..SECTORS {
            if world.is_busy_elsewhere(id, sector) {
                continue;
            }
            let until = Instant::now() + IO_LIMIT;
            let ticket = loop {
                if let Some(ticket) = world.submit(device, sector, writes) {
                    break ticket;
                }
                if Instant::now() > until {
                    return Err(format!("sector {sector} has a request that does not end"));
                }
                sleep(Duration::from_secs(1)).await;
            };
            let before = world.state().model.done;
            while world.state().model.is_running(ticket) {
                if Instant::now() > until {
                    return Err(format!("I/O to sector {sector} does not end"));
                }
                sleep(Duration::from_millis(1)).await;
            }
            if world.state().model.done == before {
                return Err(format!("I/O to sector {sector} fails"));
            }
        }
    }
    Ok(())
}

/// A reported reason is true.
fn holds(world: &World, view: &View, failure: &Failure, gone: bool) -> Result<(), String> {
    let (record, id) = (&view.record, view.record.mapping_id.as_str());
    let all = cleat_devices(world.kernel());
    let devices: Vec<&Device> = all.iter().filter(|device| is_of(device, id)).collect();
    let state = world.state();
    let workers: Vec<_> =
        state.workers.values().filter(|worker| worker.mapping_id() == Some(id)).collect();
    let message = &failure.message;
    let is_true = if message.contains("by another program") {
        let severed = world.kernel().has_vanished(&record.identity())
            || state.forced.contains(id)
            || state.was_unrecordable;
        devices.is_empty() && severed
    } else if message.contains("in the memory of its worker") {
        // A device that no worker will serve again is connected to a worker that fails its requests.
        let refuses = |w: &crate::workers::Worker| w.owner() == Some(id) && w.serves();
        let refused = devices.len() != 1 || state.workers.values().any(refuses);
        record.uri.starts_with("mem:") && workers.is_empty() && refused
    } else if message.contains("another client owns") {
        state.was_fenced(id)
    } else if message.contains("was replaced") {
        state.was_replaced(id, &record.uri)
    } else if message.contains("is alive but") {
        workers.iter().any(|worker| !worker.answers_commands())
            || record.worker.is_none_or(|id| {
                state.workers.get(&id.pid).is_some_and(|worker| worker.id == id && worker.stopped)
            })
    } else if message.contains("has shrunk") {
        let size = state.disks.get(&record.uri).map_or(0, |disk| disk.size);
        devices.iter().any(|device| size < device.size) || workers.iter().any(|w| w.has_lied)
    } else if message.contains("carry the identity") {
        devices.len() > 1
    } else if message.contains("could not be repaired") {
        drop(state);
        return is_open_elsewhere_or(world, view, gone || view.record.intent == Intent::Mapped);
    } else {
        false
    };
    if is_true { Ok(()) } else { Err("reports what is not true".to_owned()) }
}

/// Checks that a mapping that is still being repaired has a reason for it.
fn is_open_elsewhere_or(world: &World, view: &View, otherwise: bool) -> Result<(), String> {
    let state = world.state();
    let claims = state.disks.get(&view.record.uri).map(|disk| &disk.claims);
    let elsewhere =
        claims.is_some_and(|all| all.iter().any(|c| c.mapping_id != view.record.mapping_id));
    match elsewhere || otherwise {
        true if view.message.is_empty() => Err("does not say why".to_owned()),
        true => Ok(()),
        false => Err("is not repaired, though nothing is wrong any more".to_owned()),
    }
}

/// Checks that volumes contain the written data.
fn compare(world: &World) {
    let mut state = world.state();
    let crate::world::State { disks, replaced_disks, model, .. } = &mut *state;
    let replaced = replaced_disks.iter().map(|(name, disk)| (name, disk));
    let results: Vec<_> = disks
        .iter()
        .chain(replaced)
        .map(|(name, disk)| model.compare(&key(name, disk.number), disk))
        .collect();
    drop(state);
    results.into_iter().filter_map(Result::err).for_each(|error| world.violation(error));
}

/// Checks the number of reconnects: the kernel must have accepted a connection for each.
fn reconnects_are_true(world: &World, executor: &Executor) {
    for volume in executor.register().all() {
        let counted = volume.statistics().map_or(0, |page| page.reconnects());
        let replaced = world.kernel().replaced(&volume.view().record.identity());
        if counted > replaced {
            let name = &volume.name;
            world.violation(format!("{name} counts {counted} reconnects; there were {replaced}"));
        }
    }
}

/// Checks that no file system of `id`, or of any mapping, is still frozen for a snapshot if it can be
/// thawed. Mappings whose records were lost do not count: their frozen file systems are unknown.
fn nothing_is_frozen(world: &World, id: Option<&str>, when: &str) {
    for (index, identity, path) in world.kernel().frozen() {
        let owner = identity.mapping_id();
        let known = !world.state().touched.contains(owner) && id.is_none_or(|id| id == owner);
        if known && world.kernel().answers(index, &identity) {
            world.violation(format!("{when}, {owner} has {path:?} on {index} still frozen"));
        }
    }
}

/// Checks that every device, record and process belongs to a listed mapping or is reported.
async fn everything_is_known(world: &World, executor: &Arc<Executor>) {
    let known = executor.register().ids();
    let orphans = match executor.orphans(Instant::now() + UNMAP_LIMIT).await {
        Ok(orphans) => orphans,
        Err(error) => return world.violation(format!("orphans: {}", error.report())),
    };
    let reported: BTreeSet<String> =
        orphans.iter().map(|(_, identity)| identity.mapping_id().to_owned()).collect();
    for device in cleat_devices(world.kernel()) {
        let id = device.identity().map(|id| id.mapping_id().to_owned()).unwrap_or_default();
        if !known.contains(&id) && !reported.contains(&id) {
            world.violation(format!("no record names {device:?}"));
        }
    }
    for (id, name) in records(world) {
        if !known.contains(&id) && !executor.findings().iter().any(|f| f.contains(&id)) {
            world.violation(format!("no user knows the record {id} of {name}"));
        }
    }
    let unknown = || -> Vec<u32> {
        let state = world.state();
        let is_known = |id: &str| known.contains(id) || reported.contains(id);
        // A worker whose record was lost ends by itself, unless it is stopped.
        let stray = state
            .workers
            .values()
            .filter(|worker| !worker.stopped && !worker.owner().is_some_and(is_known));
        stray.map(|worker| worker.id.pid).collect()
    };
    if !unknown().is_empty() {
        sleep(ORPHAN_LIMIT).await;
    }
    let unknown = unknown();
    if !unknown.is_empty() {
        world.violation(format!("no record names the workers {unknown:?}"));
    }
}

/// Checks that a forced unmap removes each mapping in time, in any state and with any failure.
async fn force_everything_down(world: &World, executor: &Arc<Executor>) {
    for volume in executor.register().all() {
        let (name, id) = (volume.name.clone(), volume.mapping_id.clone());
        // The unmap may fail if a worker cannot be killed in time or another mapping has the volume open.
        let excused = {
            let state = world.state();
            let lingers = |w: &crate::workers::Worker| !w.quirks.linger.is_zero();
            let uri = volume.view().record.uri;
            let claims = state.disks.get(&uri).map(|disk| disk.claims.as_slice());
            state.workers.values().any(lingers)
                || claims.unwrap_or_default().iter().any(|claim| claim.mapping_id != id)
        };
        if !crate::lives::force(world.clone(), Arc::clone(executor), name.clone()).await && !excused
        {
            let state = volume.view().state;
            world.violation(format!("{name}, {state:?}, cannot be unmapped by force"));
        }
    }
}

/// Checks that an unmap removes each mapping in any state.
async fn take_everything_down(world: &World, executor: &Arc<Executor>) {
    let mut elsewhere = Vec::new();
    for volume in executor.register().all() {
        let mut last = Ok(true);
        for _ in 0..4 {
            last = executor.unmap(&volume.name, Instant::now() + UNMAP_LIMIT).await;
            if last.is_ok() {
                break;
            }
            sleep(Duration::from_secs(12)).await;
        }
        match last {
            Ok(_) => after_unmap(world, &volume.mapping_id),
            // The unmap has to open the volume to flush the device, or to prove that no writer is left.
            // Another mapping or an orphan may have it open.
            Err(_) if is_claimed_elsewhere(world, &volume.view().record) => {
                elsewhere.push(volume);
            }
            Err(error) => {
                let (name, state) = (&volume.name, volume.view().state);
                let error = error.report();
                world.violation(format!("{name}, {state:?}, cannot be unmapped: {error}"));
            }
        }
    }
    let orphans = executor.orphans(Instant::now() + UNMAP_LIMIT).await.unwrap_or_default();
    for (device, _) in orphans {
        let path = format!("/dev/nbd{}", device.index);
        let id = device.identity().map(|id| id.mapping_id().to_owned());
        let worker = {
            let state = world.state();
            let worker = state.workers.values().find(|w| w.mapping_id() == id.as_deref());
            worker.map(|worker| (worker.id.pid, worker.fenced))
        };
        if world.kernel().live_connections(device.index) == 0 || worker.is_some_and(|w| w.1) {
            // Its dirty data cannot be written, so only force removes it. A supervisor cannot find the
            // worker of such a device in this simulation.
            worker.into_iter().for_each(|(pid, _)| world.state().end(pid));
            if !crate::lives::force(world.clone(), Arc::clone(executor), path.clone()).await {
                world.violation(format!("the orphan {path} cannot be unmapped by force"));
            }
            continue;
        }
        if let Err(error) = executor.unmap(&path, Instant::now() + UNMAP_LIMIT).await {
            world.violation(format!("the orphan {path} cannot be unmapped: {}", error.report()));
        }
    }
    for volume in elsewhere {
        sleep(Duration::from_secs(60)).await;
        match executor.unmap(&volume.name, Instant::now() + UNMAP_LIMIT).await {
            Ok(_) => after_unmap(world, &volume.mapping_id),
            Err(error) => {
                let (name, error) = (&volume.name, error.report());
                world.violation(format!("{name} cannot be unmapped when it is alone: {error}"));
            }
        }
    }
}

/// Whether a worker of another mapping has the volume open.
fn is_claimed_elsewhere(world: &World, record: &Record) -> bool {
    let state = world.state();
    let claims = state.disks.get(&record.uri).map(|disk| disk.claims.as_slice());
    claims.unwrap_or_default().iter().any(|claim| claim.mapping_id != record.mapping_id)
}

/// Checks that an unmapped volume can be mapped again.
async fn map_again(world: &World, volume: &VolumePlan, executor: &Arc<Executor>) {
    let spec = crate::lives::spec_of(volume);
    match executor.map(&spec, Instant::now() + UNMAP_LIMIT).await {
        Ok(view) => {
            after_map(world, &view);
            if let Err(why) = works(world, &view).await {
                world.violation(format!("{}, mapped again: {why}", volume.name));
            }
        }
        Err(error) => {
            world.violation(format!("{} cannot be mapped again: {}", volume.name, error.report()));
        }
    }
    if let Err(error) = executor.unmap(volume.name, Instant::now() + UNMAP_LIMIT).await {
        world.violation(format!("{} cannot be unmapped again: {}", volume.name, error.report()));
    }
}

/// Checks that no device, record, socket or process is left.
fn nothing_is_left(world: &World, executor: &Arc<Executor>) {
    nothing_is_frozen(world, None, "when all is gone");
    let devices = cleat_devices(world.kernel());
    let workers: Vec<u32> = world.state().workers.keys().copied().collect();
    let records = records(world);
    let left = executor.register().all().len();
    let mut sockets = sockets(world);
    // The sockets of a mapping whose record was lost stay until the next start.
    sockets.retain(|socket| !world.state().touched.contains(mapping_of(socket)));
    if !(devices.is_empty() && workers.is_empty() && records.is_empty() && left == 0) {
        world.violation(format!(
            "left at the end: devices {devices:?}, workers {workers:?}, records {records:?}, \
             {left} mappings"
        ));
    }
    if !sockets.is_empty() {
        world.violation(format!("left at the end: {sockets:?}"));
    }
    let copies = std::fs::read_dir(world.copies()).into_iter().flatten().flatten();
    let copies: Vec<_> = copies.map(|entry| entry.file_name()).collect();
    if !copies.is_empty() {
        world.violation(format!("left at the end in the runtime directory: {copies:?}"));
    }
}
