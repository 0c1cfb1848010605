//! The calls of [`Kernel`] on the simulated kernel.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use super::device::Config;
use super::script::{failure, timed_out};
use super::watch::watch_connections;
use super::{Call, Fault, SimKernel, State, io};
use crate::{
    ConnectSpec, Device, DeviceIndex, DevicePaths, Disconnected, EVENT_QUEUE, ExclusiveOpen,
    Holder, Identity, Kernel, KernelEvent, UnmountScope,
};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

impl Kernel for SimKernel {
    fn connect(&self, spec: ConnectSpec) -> Result<DeviceIndex> {
        let (mut state, fault) = self.enter(Call::Connect, None)?;
        if spec.sockets.is_empty() || spec.size == 0 {
            let message = "invalid device: it needs at least one socket and one byte";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let index = state.free_index()?;
        let symlink_at = match fault {
            Some(Fault::NoSymlink) => None,
            _ => Some((state.script.now)() + state.script.symlink_delay),
        };
        let (identity, hook) = (spec.identity.clone(), state.connect_hook.clone());
        let config = Config::new(spec, symlink_at, state.next_instance());
        state.devices.entry(index).or_default().config = Some(config);
        state.emit(KernelEvent::Changed(index));
        hook.iter().for_each(|hook| hook(&identity));
        if fault == Some(Fault::Vanish) {
            state.vanish(index);
        }
        self.leave(state, Call::Connect, fault).map(|()| index)
    }

    fn reconfigure(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        sockets: Vec<OwnedFd>,
    ) -> Result<()> {
        let (mut state, fault) = self.enter(Call::Reconfigure, None)?;
        let config = state.config(index, identity)?;
        if fault != Some(Fault::DropSockets) {
            let replaced = config.replace_dead(sockets);
            *state.replaced.entry(identity.as_str().to_owned()).or_default() += replaced;
        }
        self.leave(state, Call::Reconfigure, fault)
    }

    fn resize(&self, index: DeviceIndex, identity: &Identity, size: u64) -> Result<()> {
        let (mut state, fault) = self.enter(Call::Resize, None)?;
        state.config(index, identity)?.size = size;
        state.emit(KernelEvent::Changed(index));
        self.leave(state, Call::Resize, fault)
    }

    fn disconnect(&self, index: DeviceIndex, identity: &Identity, deadline: Instant) -> Result<()> {
        self.send_and_shut_down(Call::Disconnect, index, identity, deadline)?;
        self.wait_until_free(index, identity, deadline)
    }

    fn open_exclusively(
        &self,
        index: DeviceIndex,
        identity: &Identity,
    ) -> Result<Result<ExclusiveOpen, Vec<Holder>>> {
        self.open_device(index, identity)
    }

    fn disconnect_exclusively(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        open: ExclusiveOpen,
        deadline: Instant,
    ) -> Result<()> {
        self.send_and_shut_down(Call::Disconnect, index, identity, deadline)?;
        drop(open);
        self.wait_until_free(index, identity, deadline)
    }

    fn unmount(&self, index: DeviceIndex, which: UnmountScope, deadline: Instant) -> Result<()> {
        let (mut state, _) = self.enter(Call::Unmount, Some(deadline))?;
        if state.devices.get(&index).is_some_and(|device| !device.frozen.is_empty()) {
            return Err(timed_out(Call::Unmount));
        }
        if let Some(device) = state.devices.get_mut(&index) {
            device.holders.retain(|holder| match (holder, which) {
                (Holder::Mount { .. }, UnmountScope::All) => false,
                (Holder::Mount { namespace_pid, .. }, UnmountScope::Own) => namespace_pid.is_some(),
                _ => true,
            });
            device.release();
        }
        drop(state);
        self.notify();
        Ok(())
    }

    fn freeze(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Vec<String>> {
        self.freeze_all(index, identity, deadline)
    }

    fn thaw(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        spared: &[String],
        deadline: Instant,
    ) -> Result<()> {
        self.thaw_all(index, identity, spared, deadline)
    }

    fn force_disconnect(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Disconnected> {
        self.send_and_shut_down(Call::ForceDisconnect, index, identity, deadline)?;
        let held = self.state().config(index, identity).is_ok();
        Ok(if held { Disconnected::Held } else { Disconnected::Free })
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let (state, _) = self.enter(Call::Devices, None)?;
        drop(state);
        Ok(self.show())
    }

    fn holders(&self, index: DeviceIndex) -> Result<Vec<Holder>> {
        let (state, _) = self.enter(Call::Holders, None)?;
        Ok(state.devices.get(&index).map(|device| device.holders.clone()).unwrap_or_default())
    }

    fn wait_ready(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        size: u64,
        deadline: Instant,
    ) -> Result<DevicePaths> {
        drop(self.enter(Call::WaitReady, Some(deadline))?);
        self.wait(Call::WaitReady, deadline, |state| {
            let now = (state.script.now)();
            let config = match state.config(index, identity) {
                Ok(config) => config,
                Err(error) => return Ok(Err(error)),
            };
            if config.size != size {
                return Err("the device has another size");
            }
            let ready = config.symlink_at.is_some_and(|at| at <= now);
            if ready { Ok(Ok(())) } else { Err("the symlink does not exist") }
        })??;
        let symlink = PathBuf::from(format!("/dev/disk/by-id/cleat-{}", identity.name()));
        Ok(DevicePaths { node: PathBuf::from(format!("/dev/nbd{index}")), symlink })
    }

    fn flush(&self, index: DeviceIndex, deadline: Instant) -> Result<()> {
        drop(self.enter(Call::Flush, Some(deadline))?);
        let message = || format!("cannot flush /dev/nbd{index}");
        self.flush_device(index, deadline).map_err(|error| Error::from_io(message(), error))
    }

    fn probe(&self, index: DeviceIndex, deadline: Instant) -> Result<()> {
        let message = || format!("cannot read /dev/nbd{index}");
        self.read_until(index, 0, 512, deadline)
            .map(drop)
            .map_err(|error| Error::from_io(message(), error))
    }

    fn events(&self) -> Result<Receiver<KernelEvent>> {
        let (mut state, _) = self.enter(Call::Events, None)?;
        let (sender, receiver) = crossbeam_channel::bounded(EVENT_QUEUE);
        state.subscribers.push(sender);
        if state.script.watch_connections && !std::mem::replace(&mut state.watched, true) {
            let (shared, wake) = (Arc::downgrade(&self.0), Arc::clone(&self.0.wake));
            std::thread::spawn(move || watch_connections(&shared, &wake));
        }
        Ok(receiver)
    }

    fn stuck(&self) -> usize {
        self.state().stuck
    }
}

impl SimKernel {
    /// Carries out DISCONNECT: sends NBD_CMD_DISC on every connection, which may block, and shuts them down.
    fn send_and_shut_down(
        &self,
        call: Call,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<()> {
        let (mut state, fault) = self.enter(call, Some(deadline))?;
        let Ok(config) = state.config(index, identity) else { return Ok(()) };
        let connections = config.connections.clone();
        let skip_waits = state.script.skip_waits;
        drop(state);
        let until = if skip_waits { SystemClock.now() } else { deadline };
        if !connections.iter().all(|connection| io::send_disconnect(connection, until)) {
            return Err(timed_out(call));
        }
        let mut state = self.state();
        if let Ok(config) = state.config(index, identity) {
            config.disconnected = true;
            config.shut_down();
            state.devices.entry(index).or_default().release();
            state.emit(KernelEvent::Changed(index));
        }
        self.leave(state, call, fault)
    }

    fn wait_until_free(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<()> {
        self.wait(Call::Disconnect, deadline, |state| match state.config(index, identity) {
            Ok(_) => Err("the device is held"),
            Err(_) => Ok(()),
        })
    }

    /// Begins a call: checks the module and the permission, takes a fault, and marks dead connections.
    pub(super) fn enter(
        &self,
        call: Call,
        deadline: Option<Instant>,
    ) -> Result<(MutexGuard<'_, State>, Option<Fault>)> {
        let mut state = self.state();
        let reads_only = matches!(call, Call::Devices | Call::Holders);
        if !state.module && !reads_only {
            return Err(crate::module_missing());
        }
        if !state.permission && !reads_only {
            return Err(crate::permission_missing());
        }
        let fault = state.take_fault(call);
        tracing::trace!(?call, ?fault, "kernel");
        match fault {
            Some(Fault::Fail(kind)) => return Err(failure(call, kind)),
            Some(Fault::Hang) => {
                let deadline =
                    deadline.unwrap_or_else(|| SystemClock.now() + state.script.command_timeout);
                drop(state);
                return Err(self
                    .wait(call, deadline, |_| Err::<(), _>("an injected fault"))
                    .err()
                    .unwrap_or_else(|| timed_out(call)));
            }
            Some(Fault::Slow(time)) => {
                drop(state);
                #[allow(clippy::disallowed_methods, reason = "the caller waits in real time, too")]
                std::thread::sleep(time);
                state = self.state();
            }
            _ => {}
        }
        state.check_connections();
        Ok((state, fault))
    }

    /// Ends a call that had its effect.
    pub(super) fn leave(
        &self,
        state: MutexGuard<'_, State>,
        call: Call,
        fault: Option<Fault>,
    ) -> Result<()> {
        drop(state);
        self.notify();
        if fault == Some(Fault::LateEffect) { Err(timed_out(call)) } else { Ok(()) }
    }

    /// Wakes waiting calls and the thread that watches the connections.
    pub(super) fn notify(&self) {
        self.0.changed.notify_all();
        // EAGAIN means that a wake-up is pending.
        let _ = self.0.wake.write(1);
    }

    /// Waits until `done` returns a value or the deadline passes; with `Script::skip_waits`, calls it once.
    fn wait<T>(
        &self,
        call: Call,
        deadline: Instant,
        mut done: impl FnMut(&mut State) -> Result<T, &'static str>,
    ) -> Result<T> {
        let mut state = self.state();
        loop {
            let missing = match done(&mut state) {
                Ok(value) => return Ok(value),
                Err(missing) => missing,
            };
            let now = SystemClock.now();
            if now >= deadline || state.script.skip_waits {
                return Err(timed_out(call).with_source(missing));
            }
            // No event announces the symlink, so the wait is cut into pieces.
            let piece = (deadline - now).min(Duration::from_millis(5));
            let waited = self.0.changed.wait_timeout(state, piece);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
