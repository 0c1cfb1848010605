//! The actions of a plan, one function each. Each action is bounded in time and safe to repeat, and the
//! next observation sees everything that it leaves behind.

mod connect;
mod disconnect;
mod fail_io;
mod force_disconnect;
mod grow;
mod handover;
mod open_exclusively;
mod prove_no_writes;
mod quiesce;
mod reconnect;
mod record;
mod refuse_io;
mod remove_record;
pub(crate) mod resize_device;
mod sockets;
mod start_worker;
mod stop_worker;
mod unmount;
mod unquiesce;
mod wait_for_device;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::Action;
use cleat_core::error::Result;

pub(crate) use fail_io::{FAIL_TIMEOUT, fail_all, kill};
pub(crate) use force_disconnect::force_disconnect;
pub(crate) use open_exclusively::open_exclusively;
pub(crate) use sockets::wait_for_connections;
pub(crate) use unmount::{UNMOUNT_TIMEOUT, unmount};
pub(crate) use unquiesce::unquiesce_all;

/// Runs one action of a plan.
///
/// # Errors
/// Returns the error of the action. The effects of a failed action stay.
pub(crate) async fn run(
    cx: &Context,
    guard: &mut Guard,
    action: Action,
    deadline: Instant,
) -> Result<()> {
    match action {
        Action::StartWorker => {
            let started = start_worker::start_worker(cx, guard, deadline).await;
            started.map_err(|error| disconnect::not_flushed(guard, error))
        }
        Action::Connect => connect::connect(cx, guard, deadline).await,
        Action::WaitForDevice => wait_for_device::wait_for_device(cx, guard, deadline).await,
        Action::RecordMapped => record::record_mapped(cx, guard).await,
        Action::Reconnect { index, missing } => {
            let connected = reconnect::reconnect(cx, guard, index, missing, deadline).await;
            connected.map_err(|error| disconnect::not_flushed(guard, error))
        }
        Action::RefuseIo { index, connections } => {
            refuse_io::refuse_io(cx, guard, index, connections, deadline).await
        }
        Action::RecordFenced => {
            record::record_fenced(cx, guard).await;
            Ok(())
        }
        Action::RecordSyncFailed => {
            record::record_sync_failed(cx, guard).await;
            Ok(())
        }
        Action::GrowDevice { index, size } => {
            grow::grow(cx, guard, index, size, deadline).await;
            Ok(())
        }
        Action::Quiesce { index, snapshot } => {
            quiesce::quiesce(cx, guard, index, snapshot, deadline).await
        }
        Action::Unquiesce => unquiesce::unquiesce(cx, guard, deadline).await,
        Action::TryUnquiesce => {
            unquiesce::try_unquiesce(cx, guard, deadline).await;
            Ok(())
        }
        Action::RecordUnmapping => {
            record::record_unmapping(cx, guard).await;
            Ok(())
        }
        Action::OpenExclusively(index) => open_exclusively::run(cx, guard, index, deadline).await,
        Action::Flush(index) => disconnect::flush(cx, guard, index, deadline).await,
        Action::Disconnect(index) => disconnect::disconnect(cx, guard, index, deadline).await,
        Action::StopWorker => stop_worker::stop_worker(cx, guard, deadline).await,
        Action::StopPredecessor => handover::stop_predecessor(cx, guard, deadline).await,
        Action::RestorePredecessor => {
            handover::restore_predecessor(cx, guard).await;
            Ok(())
        }
        Action::WaitForConnect => guard.mapping().wait_for_connect(deadline).await,
        Action::RemoveRecord => remove_record::remove_record(cx, guard, deadline).await,
        Action::FailIo => fail_io::fail_io(cx, guard, deadline).await,
        Action::Unmount(index, unmount) => {
            unmount::run(cx, guard, index, unmount, deadline).await;
            Ok(())
        }
        Action::ForceDisconnect(index) => force_disconnect::run(cx, guard, index, deadline).await,
        Action::ReleaseClaim => prove_no_writes::release_claim(cx, guard, deadline).await,
        Action::ProveNoWrites => prove_no_writes::prove_no_writes(cx, guard, deadline).await,
    }
}
