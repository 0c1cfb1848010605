//! Any volume, with injected faults: latency, hangs and errors, by operation, range and rate. For
//! tests; not part of release packages.
//!
//! What happens to the n-th request of the volume follows from the plan's seed and n alone. The plan
//! can be replaced while the volume is in use ([`SetFault`]): that releases every request
//! that hangs. What is held back lives in the thread's own queue, so that a shutdown frees it
//! without waiting. Once an injected error was `fenced`, the volume stays fenced, as the contract
//! demands of every backend.

mod plan;
mod queue;
mod spec;
mod timer;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::{
    BackgroundWork, Image, ImageQueue, Outcome, RenewCredentials, RequestId, SnapshotQuiesce, Waker,
};
use super::{Completer, Extents, Handover, HandoverFiles, HandoverState, Resize, SetFault, Shrink};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Features};
use cleat_sys::ring::Ring;
use plan::{PREFIX, Plan};
use queue::FaultQueue;
pub use spec::BACKEND;
use timer::Timer;

/// A volume that misbehaves on demand.
struct FaultImage {
    inner: Arc<dyn Image>,
    shared: Arc<Shared>,
}

/// What the queues of a volume share.
struct Shared {
    plan: Mutex<Arc<Plan>>,
    /// Raised with every new plan.
    plan_number: AtomicU64,
    /// Requests so far, over all queues.
    requests: AtomicU64,
    fenced: AtomicBool,
    /// Wakes the owner of the volume when an injected error has fenced it.
    watcher: OnceLock<Waker>,
    /// Requests that hang until a plan with another number is in force.
    hanging: Mutex<Vec<Hanging>>,
    timer: Mutex<Option<Arc<Timer>>>,
}

struct Hanging {
    completer: Completer,
    id: RequestId,
}

/// The end of a delay. What becomes of the request is decided by its queue.
const RELEASED: Outcome = Outcome { result: Ok(()), buffer: None };

impl Shared {
    /// Completes an operation of the request `id` as soon as the plan is no longer number `plan_number`.
    fn complete_with_next_plan(&self, plan_number: u64, completer: &Completer, id: RequestId) {
        let mut hanging = lock(&self.hanging);
        // A new plan raises its number before it releases what hangs.
        if self.plan_number.load(Ordering::Acquire) == plan_number {
            hanging.push(Hanging { completer: completer.clone(), id });
        } else {
            completer.complete(id, RELEASED);
        }
    }

    /// Forgets the requests of a connection that has ended.
    fn forget(&self, completer: &Completer) {
        lock(&self.hanging).retain(|hanging| !hanging.completer.is_same(completer));
    }
}

/// The variable of the environment that names a point at which the process is to die.
pub const DIE_AT: &str = "CLEAT_FAULT_DIE_AT";

/// A point that a test may have the process die at, as by a crash: nothing of it runs any more.
pub fn crash_point(name: &str) {
    if std::env::var(DIE_AT).is_ok_and(|wanted| wanted == name) {
        std::process::abort();
    }
}

impl FaultImage {
    /// `inner`, behind the faults of `plan`.
    fn wrap(inner: Arc<dyn Image>, plan: Plan) -> Self {
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

    fn size_check_interval(&self) -> Option<Duration> {
        self.inner.size_check_interval()
    }

    fn retries_no_space(&self) -> bool {
        self.inner.retries_no_space()
    }

    fn is_fenced(&self) -> bool {
        self.shared.fenced.load(Ordering::Acquire) || self.inner.is_fenced()
    }

    fn failure_reason(&self) -> Option<String> {
        let plan = Arc::clone(&lock(&self.shared.plan));
        let injected = plan.is_outage().then(|| format!("injected: {plan}"));
        injected.or_else(|| self.inner.failure_reason())
    }

    fn close(&self) {
        self.inner.close();
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
    /// The wrapped volume's handover.
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
        let plan: Plan = plan.parse()?;
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
