//! Injects faults into the requests of another volume: latency, hangs and errors, by operation, range and
//! rate. For tests; not part of release packages.
//!
//! The seed of the plan and the number of a request determine what happens to the request. The plan can be
//! replaced while the volume is in use ([`SetFault`]), which releases every request that hangs. A delayed
//! request is stored in the queue of its thread, so that a shutdown frees it without waiting. After an
//! injected error `fenced` the volume stays fenced, as the contract requires of every backend.

mod plan;
mod queue;
mod spec;
mod timer;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{
    BackgroundWork, Image, ImageQueue, Outcome, RenewCredentials, RequestId, SizeChecks,
    SnapshotQuiesce, VolumeIdentity, Waker, WriteHold,
};
use super::{Completer, Extents, Handover, HandoverFiles, HandoverState, Resize, SetFault, Shrink};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Features};
use cleat_sys::ring::Ring;
use plan::{PREFIX, Plan};
use queue::FaultQueue;
pub use spec::BACKEND;
use timer::Timer;

/// A volume with injected faults.
struct FaultImage {
    inner: Arc<dyn Image>,
    shared: Arc<Shared>,
}

/// The state that the queues of a volume share.
struct Shared {
    plan: Mutex<Arc<Plan>>,
    /// The number of the plan, which every new plan increments.
    plan_number: AtomicU64,
    /// The number of requests so far, in all queues.
    requests: AtomicU64,
    fenced: AtomicBool,
    /// Wakes the owner of the volume when an injected error has fenced it.
    watcher: OnceLock<Waker>,
    /// Requests that hang until a plan with another number is set.
    hanging: Mutex<Vec<Hanging>>,
    timer: Mutex<Option<Arc<Timer>>>,
}

struct Hanging {
    completer: Completer,
    id: RequestId,
}

/// The end of a delay. The queue of the request decides how the request continues.
const RELEASED: Outcome = Outcome { result: Ok(()), buffer: None };

impl Shared {
    /// Completes an operation of the request `id` as soon as the plan `plan_number` is replaced.
    fn complete_with_next_plan(&self, plan_number: u64, completer: &Completer, id: RequestId) {
        let mut hanging = lock(&self.hanging);
        // A new plan sets its number before it releases the requests that hang.
        if self.plan_number.load(Ordering::Acquire) == plan_number {
            hanging.push(Hanging { completer: completer.clone(), id });
        } else {
            completer.complete(id, RELEASED);
        }
    }

    /// Removes the requests of a connection that has ended.
    fn forget(&self, completer: &Completer) {
        lock(&self.hanging).retain(|hanging| !hanging.completer.is_same(completer));
    }
}

/// The environment variable with the name of the point at which the process aborts.
pub const DIE_AT: &str = "CLEAT_FAULT_DIE_AT";

/// Aborts the process, as a crash would, if the environment variable [`DIE_AT`] has the value `name`.
pub fn crash_point(name: &str) {
    if std::env::var(DIE_AT).is_ok_and(|wanted| wanted == name) {
        std::process::abort();
    }
}

impl FaultImage {
    /// Wraps `inner` with the faults of `plan`.
    fn wrap(inner: Arc<dyn Image>, mut plan: Plan) -> Self {
        if plan.take_fail_sync() {
            inner.fail_next_sync();
        }
        inner.set_drop_syncs(plan.drops_syncs());
        let shared = Shared {
            plan: Mutex::new(Arc::new(plan)),
            plan_number: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            fenced: AtomicBool::new(false),
            watcher: OnceLock::new(),
            hanging: Mutex::default(),
            timer: Mutex::default(),
        };
        Self { inner, shared: Arc::new(shared) }
    }
}

impl Image for FaultImage {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn block_sizes(&self) -> BlockSizes {
        self.inner.block_sizes()
    }

    fn features(&self) -> Features {
        self.inner.features()
    }

    fn identity(&self) -> VolumeIdentity {
        self.inner.identity()
    }

    fn queue(&self, ring: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        let inner = self.inner.queue(ring, completer)?;
        let timer = {
            let mut timer = lock(&self.shared.timer);
            match timer.as_ref() {
                Some(timer) => Arc::clone(timer),
                None => Arc::clone(timer.insert(Arc::new(Timer::start()?))),
            }
        };
        let shared = Arc::clone(&self.shared);
        Ok(Box::new(FaultQueue::new(inner, shared, timer, completer.clone())))
    }

    fn refresh_size(&self) -> Result<u64> {
        self.inner.refresh_size()
    }

    fn watch_changes(&self, waker: Waker) {
        // The worker that serves the volume calls this once.
        let _ = self.shared.watcher.set(waker.clone());
        self.inner.watch_changes(waker);
    }

    fn size_checks(&self) -> SizeChecks {
        self.inner.size_checks()
    }

    fn retries_no_space(&self) -> bool {
        self.inner.retries_no_space()
    }

    fn is_fenced(&self) -> bool {
        self.shared.fenced.load(Ordering::Acquire) || self.inner.is_fenced()
    }

    fn sync_failed(&self) -> bool {
        self.inner.sync_failed()
    }

    fn failure_reason(&self) -> Option<String> {
        let plan = Arc::clone(&lock(&self.shared.plan));
        let injected = plan.is_outage().then(|| format!("injected: {plan}"));
        injected.or_else(|| self.inner.failure_reason())
    }

    fn close(&self) -> bool {
        self.inner.close()
    }

    fn resize(&self) -> Option<&dyn Resize> {
        self.inner.resize()
    }

    fn shrink(&self) -> Option<&dyn Shrink> {
        self.inner.shrink()
    }

    fn extents(&self) -> Option<&dyn Extents> {
        self.inner.extents()
    }

    fn handover(&self) -> Option<&dyn Handover> {
        self.inner.handover().map(|_| self as &dyn Handover)
    }

    fn snapshot_quiesce(&self) -> Option<&dyn SnapshotQuiesce> {
        self.inner.snapshot_quiesce()
    }

    fn write_hold(&self) -> Option<&dyn WriteHold> {
        self.inner.write_hold()
    }

    fn background(&self) -> Option<&dyn BackgroundWork> {
        self.inner.background()
    }

    fn renew_credentials(&self) -> Option<&dyn RenewCredentials> {
        self.inner.renew_credentials()
    }

    fn set_fault(&self) -> Option<&dyn SetFault> {
        Some(self)
    }
}

impl FaultImage {
    /// Returns the handover of the wrapped volume.
    fn inner_handover(&self) -> Result<&dyn Handover> {
        self.inner.handover().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "the wrapped volume cannot be handed over")
        })
    }
}

impl Handover for FaultImage {
    fn prepare(&self) -> Result<HandoverFiles> {
        self.inner_handover()?.prepare()
    }

    fn release(&self) -> Result<HandoverState> {
        let state = self.inner_handover()?.release()?;
        let fenced = state.fenced || self.shared.fenced.load(Ordering::Acquire);
        Ok(HandoverState { fenced, faults: Some(lock(&self.shared.plan).to_string()), ..state })
    }

    fn resume(&self) -> Result<()> {
        self.inner_handover()?.resume()
    }

    fn take_over(&self, state: &HandoverState) -> Result<()> {
        self.inner_handover()?.take_over(state)?;
        self.shared.fenced.fetch_or(state.fenced, Ordering::AcqRel);
        state.faults.as_ref().map_or(Ok(()), |plan| SetFault::set_fault(self, plan))
    }
}

impl SetFault for FaultImage {
    fn set_fault(&self, plan: &str) -> Result<()> {
        let mut plan: Plan = plan.parse()?;
        if plan.take_fail_sync() {
            self.inner.fail_next_sync();
        }
        self.inner.set_drop_syncs(plan.drops_syncs());
        tracing::info!(%plan, "the injected faults were replaced");
        *lock(&self.shared.plan) = Arc::new(plan);
        self.shared.plan_number.fetch_add(1, Ordering::Release);
        for Hanging { completer, id } in lock(&self.shared.hanging).drain(..) {
            completer.complete(id, RELEASED);
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
