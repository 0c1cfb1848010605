//! Runs calls to the kernel on separate threads, off the event loop. A call that exceeds its timeout keeps
//! its thread until it returns. The number of threads is limited.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, sleep, timeout_at};

use crate::blocking::spawn;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{ConnectSpec, DeviceIndex, Identity, Kernel};

/// Calls to the kernel from the event loop.
pub(crate) struct KernelCalls {
    kernel: Arc<dyn Kernel>,
    commands: Slots,
    waits: Slots,
}

/// Limits the number of calls in progress.
#[derive(Clone)]
struct Slots {
    permits: Arc<Semaphore>,
    max: usize,
}

impl Slots {
    fn new(max: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(max)), max }
    }

    fn used(&self) -> usize {
        self.max - self.permits.available_permits()
    }
}

/// The calls to the kernel in progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelLoad {
    /// Commands in progress, stuck ones included.
    pub commands: usize,
    /// Calls in progress that wait for an event, stuck ones included.
    pub waits: usize,
    /// Calls that exceeded their timeout and have not returned.
    pub stuck: usize,
}

/// The maximum number of commands in progress, stuck ones included.
pub(crate) const MAX_COMMANDS: usize = 12;

/// The maximum number of calls in progress that wait for udev, for a flush or for a disconnect.
pub(crate) const MAX_WAITS: usize = 36;

/// The maximum number of urgent calls in progress: queries about devices and forced unmaps.
pub(crate) const MAX_URGENT: usize = 16;

/// The timeout of one command, from the time at which its thread starts.
pub(crate) const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// The timeout of a connect, from the time at which its thread starts. It is longer than that of other
/// commands, and longer than the limit that the kernel crate sets for its own part.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(40);

/// How long after a call's own deadline its caller waits for the thread.
const SLACK: Duration = Duration::from_millis(500);

impl KernelCalls {
    /// Creates the calls to `kernel`.
    pub(crate) fn new(kernel: Arc<dyn Kernel>) -> Self {
        Self { kernel, commands: Slots::new(MAX_COMMANDS), waits: Slots::new(MAX_WAITS) }
    }

    /// Returns calls to the same kernel with threads of their own, which never wait behind the other calls.
    pub(crate) fn urgent(&self) -> Self {
        let slots = Slots::new(MAX_URGENT);
        Self { kernel: Arc::clone(&self.kernel), commands: slots.clone(), waits: slots }
    }

    /// Returns the kernel itself. Its calls may block the caller.
    pub(crate) fn kernel(&self) -> &Arc<dyn Kernel> {
        &self.kernel
    }

    /// Waits until no call is in progress, stuck ones included, and blocks new calls meanwhile. Returns
    /// false if `deadline` passes before.
    pub(crate) async fn wait_until_idle(&self, deadline: Instant) -> bool {
        let all = |slots: &Slots| u32::try_from(slots.max).unwrap_or(u32::MAX);
        let idle = async {
            // New calls wait behind this.
            drop(self.commands.permits.acquire_many(all(&self.commands)).await);
            drop(self.waits.permits.acquire_many(all(&self.waits)).await);
            // A netlink command that the kernel crate gave up has a thread there and no permit here.
            while self.kernel.stuck() > 0 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout_at(deadline, idle).await.is_ok()
    }

    /// Returns the number of calls in progress.
    pub(crate) fn load(&self) -> KernelLoad {
        KernelLoad {
            commands: self.commands.used(),
            waits: self.waits.used(),
            stuck: self.kernel.stuck(),
        }
    }

    /// Runs a call that should return soon. It waits for a thread until `deadline` at most, and then has
    /// [`COMMAND_TIMEOUT`]. `what` completes "could not …" in error messages.
    ///
    /// # Errors
    /// Returns the call's error, and `TimedOut` if the call does not return in time; it may still take
    /// effect then.
    pub(crate) async fn command<T: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        call: impl FnOnce(&dyn Kernel) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.run(&self.commands, what, deadline, Some(COMMAND_TIMEOUT), |kernel, _| call(kernel))
            .await
    }

    /// Connects a device and returns its index. If the kernel connects it after the timeout, the device is
    /// disconnected again. `permit` is dropped when the kernel has finished the call.
    ///
    /// # Errors
    /// As [`KernelCalls::command`].
    pub(crate) async fn connect(
        &self,
        spec: ConnectSpec,
        permit: impl Send + 'static,
        deadline: Instant,
    ) -> Result<DeviceIndex> {
        let (sender, mut receiver) = oneshot::channel();
        let identity = spec.identity.clone();
        let call = move |kernel: &dyn Kernel, _| {
            let _permit = permit;
            let index = kernel.connect(spec)?;
            if sender.send(index).is_err() {
                tracing::warn!(index, "a device was connected after the timeout: disconnecting it");
                let until = (Instant::now() + COMMAND_TIMEOUT).into_std();
                kernel.disconnect(index, &identity, until)?;
            }
            Ok(())
        };
        let limit = Some(CONNECT_TIMEOUT);
        let connected = self.run(&self.commands, "connect a device", deadline, limit, call).await;
        // A device that the kernel connects from here on is disconnected by the thread.
        receiver.close();
        match (receiver.try_recv(), connected) {
            (Ok(index), _) => Ok(index),
            (Err(_), Err(error)) => Err(error),
            (Err(_), Ok(())) => {
                Err(Error::new(ErrorKind::Internal, "internal: the kernel connected no device"))
            }
        }
    }

    /// Freezes the file systems on a device, and returns those that were already frozen. After the timeout
    /// nothing is frozen any more, and file systems that were frozen too late are thawed.
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
            let already_frozen = kernel.freeze(index, &identity, until)?;
            if let Err(already_frozen) = sender.send(already_frozen) {
                tracing::warn!(index, "file systems were frozen after the timeout: thawing them");
                let until = (Instant::now() + COMMAND_TIMEOUT).into_std();
                kernel.thaw(index, &identity, &already_frozen, until)?;
            }
            Ok(())
        };
        let frozen = self.wait("freeze the file systems", deadline, None, call).await;
        // File systems that are frozen from here on are thawed by the thread.
        receiver.close();
        match (receiver.try_recv(), frozen) {
            (Ok(already_frozen), _) => Ok(already_frozen),
            (Err(_), Err(error)) => Err(error),
            (Err(_), Ok(())) => {
                Err(Error::new(ErrorKind::TimedOut, "the file systems were not frozen in time"))
            }
        }
    }

    /// Runs a call that waits for an event. The call gets its deadline as an argument: `deadline`, or
    /// `timeout` after its thread has started if that is earlier. `what` completes "could not …" in error
    /// messages.
    ///
    /// # Errors
    /// As [`KernelCalls::command`].
    pub(crate) async fn wait<T: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        timeout: Option<Duration>,
        call: impl FnOnce(&dyn Kernel, std::time::Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.run(&self.waits, what, deadline, timeout, call).await
    }

    async fn run<T: Send + 'static>(
        &self,
        slots: &Slots,
        what: &'static str,
        deadline: Instant,
        timeout: Option<Duration>,
        call: impl FnOnce(&dyn Kernel, std::time::Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let late = |message: String| Error::new(ErrorKind::TimedOut, message);
        let permit = timeout_at(deadline, Arc::clone(&slots.permits).acquire_owned())
            .await
            .map_err(|_| {
                late(format!("could not {what}: too many earlier kernel calls have not returned"))
            })?
            .map_err(|_| Error::new(ErrorKind::Unavailable, "the daemon is shutting down"))?;
        let deadline = timeout.map_or(deadline, |timeout| deadline.min(Instant::now() + timeout));
        let kernel = Arc::clone(&self.kernel);
        let thread = spawn(what, move || {
            // Held until the call returns, also if its caller has timed out before.
            let _permit = permit;
            call(kernel.as_ref(), deadline.into_std())
        });
        match timeout_at(deadline + SLACK, thread).await {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => Err(Error::new(
                ErrorKind::Internal,
                format!("could not {what}: internal: the call panicked"),
            )
            .with_source(panic)),
            Err(_) => Err(late(format!("could not {what}: the kernel did not answer in time"))
                .with_repair("see the kernel's log (dmesg); the command may still take effect")),
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
    async fn a_device_connected_after_the_timeout_is_disconnected() {
        let kernel = SimKernel::new(Script::default());
        let calls = KernelCalls::new(Arc::new(kernel.clone()));
        kernel.inject(Call::Connect, Fault::Slow(SLACK + Duration::from_millis(300)));
        let error = calls.connect(spec(), (), Instant::now()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        // The late call ends with its thread, which holds the slot.
        assert!(!calls.wait_until_idle(Instant::now()).await);
        assert!(calls.wait_until_idle(Instant::now() + COMMAND_TIMEOUT).await);
        assert!(kernel.devices().unwrap().iter().all(|device| !device.connected));
    }

    #[tokio::test]
    async fn kernel_calls_with_a_stuck_thread_are_not_idle() {
        let kernel = SimKernel::new(Script::default());
        let calls = KernelCalls::new(Arc::new(kernel.clone()));
        for calls in [&calls, &calls.urgent()] {
            kernel.set_stuck(1);
            assert!(!calls.wait_until_idle(Instant::now() + Duration::from_millis(50)).await);
            kernel.set_stuck(0);
            assert!(calls.wait_until_idle(Instant::now() + COMMAND_TIMEOUT).await);
        }
    }

    #[tokio::test]
    async fn a_device_connected_in_time_stays() {
        let kernel = SimKernel::new(Script::default());
        let calls = KernelCalls::new(Arc::new(kernel.clone()));
        let index = calls.connect(spec(), (), Instant::now() + COMMAND_TIMEOUT).await.unwrap();
        assert!(kernel.devices().unwrap().iter().any(|d| d.index == index && d.connected));
    }
}
