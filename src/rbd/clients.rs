//! Clients of clusters that stay connected for a while after a call, for the next one.
//!
//! To connect takes several round trips to the monitors and the start of a dozen threads, and in a fail-over the record
//! of an image is read and written several times within seconds. A client is used by one call at a time. One with which
//! a call has failed is not used again, and neither is one whose call hangs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, Result};
use librbd::{Cluster, Config};

use crate::connection::connect;
use crate::keyring::ClientKey;

/// How long a client stays connected without a call.
const KEPT: Duration = Duration::from_secs(60);

/// The maximum number of clients without a call. Each has a dozen threads and some MiB of memory.
const MAX_IDLE: usize = 4;

static IDLE: Mutex<Idle> = Mutex::new(Idle { clients: Vec::new(), is_watched: false });

/// The clients without a call.
struct Idle {
    clients: Vec<KeptClient>,
    /// Whether a thread will disconnect them.
    is_watched: bool,
}

/// A client, and with what it was connected.
pub(crate) struct KeptClient {
    cluster: Arc<Cluster>,
    config: Config,
    key: Option<ClientKey>,
    idle_since: Instant,
}

impl KeptClient {
    /// Finds or connects a client, and calls `open` with it: again with a new client if that fails with one that was
    /// connected before. Blocks without a limit.
    ///
    /// # Errors
    /// Returns the error of `open`, and that of connecting as `failed` makes it.
    pub(crate) fn with<T>(
        config: Config,
        key: Option<ClientKey>,
        failed: impl Fn(librbd::Error) -> Error,
        open: impl Fn(&Arc<Cluster>) -> Result<T>,
    ) -> Result<(T, Self)> {
        if let Some(client) = Self::idle(&config, key.as_ref())
            && let Ok(opened) = open(&client.cluster)
        {
            return Ok((opened, client));
        }
        let cluster = connect(&config, key.as_ref()).map_err(failed)?;
        let opened = open(&cluster)?;
        Ok((opened, Self { cluster, config, key, idle_since: SystemClock.now() }))
    }

    /// Keeps the client for the next call.
    pub(crate) fn keep(mut self) {
        self.idle_since = SystemClock.now();
        let mut idle = idle();
        if idle.clients.len() == MAX_IDLE {
            drop(idle);
            return;
        }
        idle.clients.push(self);
        if !idle.is_watched {
            // Without the thread, the client stays connected until a later one is kept.
            let thread = thread::Builder::new().name("rbd-idle".to_owned());
            idle.is_watched = thread.spawn(disconnect_idle_clients).is_ok();
        }
    }

    fn idle(config: &Config, key: Option<&ClientKey>) -> Option<Self> {
        let clients = &mut idle().clients;
        let at = clients.iter().position(|client| client.is_of(config, key))?;
        Some(clients.swap_remove(at))
    }

    fn is_of(&self, config: &Config, key: Option<&ClientKey>) -> bool {
        self.config == *config && self.key.as_ref().map(ClientKey::text) == key.map(ClientKey::text)
    }
}

/// Disconnects clients that have been idle for [`KEPT`], until there are none.
#[expect(clippy::disallowed_methods, reason = "a thread of its own waits for time to pass")]
fn disconnect_idle_clients() {
    loop {
        thread::sleep(KEPT);
        let now = SystemClock.now();
        let mut idle = idle();
        let is_due =
            |client: &mut KeptClient| now.saturating_duration_since(client.idle_since) >= KEPT;
        let due: Vec<KeptClient> = idle.clients.extract_if(.., is_due).collect();
        idle.is_watched = !idle.clients.is_empty();
        let is_watched = idle.is_watched;
        drop(idle);
        // The cluster may not answer, so nothing is locked.
        drop(due);
        if !is_watched {
            return;
        }
    }
}

fn idle() -> MutexGuard<'static, Idle> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}
