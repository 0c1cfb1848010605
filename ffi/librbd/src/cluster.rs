//! A connection to a cluster: one RADOS client.

use std::ffi::c_char;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

use librbd_sys::{Api, api, rados_t};

use crate::error::{Error, Result, check};
use crate::text::{c_string, growing, owned, until_zero};

/// Where a cluster is, and who we are there. Secrets are read by the library, from files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The configuration file; `/etc/ceph/ceph.conf` where it exists, by default.
    pub conf: Option<PathBuf>,
    /// The client's name without `client.`; `admin` by default.
    pub id: Option<String>,
    /// The file with the client's key; by default where the configuration says.
    pub keyring: Option<PathBuf>,
    /// Options of Ceph that go before the configuration file, where the library knows them.
    pub defaults: Vec<(String, String)>,
    /// Options of Ceph that go before those, too.
    pub overrides: Vec<(String, String)>,
    /// How long the monitors may take to answer, at the start and later.
    pub monitor_timeout: Duration,
}

/// A connected client. Ends when dropped, after every pool and image of it.
#[derive(Debug)]
pub struct Cluster {
    pub(crate) api: &'static Api,
    pub(crate) handle: rados_t,
}

// SAFETY: a rados_t may be used from any thread, by several at once (librados.h: "All functions are
// thread safe" but for what changes an ioctx); its configuration is only set before it is shared.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Connects. Blocks, for about the monitors' timeout at most.
    ///
    /// # Errors
    /// When the libraries are missing, the configuration is wrong, the key is refused, or no monitor
    /// answers in time.
    pub fn connect(config: &Config) -> Result<Arc<Self>> {
        let cluster = Self::configured(config)?;
        // SAFETY: the handle is open and not connected yet.
        check(unsafe { (cluster.api.rados.rados_connect)(cluster.handle) }, || {
            format!("connect to the cluster as client.{}", config.id())
        })?;
        Ok(Arc::new(cluster))
    }

    fn configured(config: &Config) -> Result<Self> {
        let api = api().map_err(Error::no_library)?;
        let name = c_string(&format!("client.{}", config.id()), "a client's name")?;
        let mut handle = null_mut();
        // SAFETY: the texts are C strings, and `handle` takes what is made.
        let created = unsafe {
            (api.rados.rados_create2)(&raw mut handle, c"ceph".as_ptr(), name.as_ptr(), 0)
        };
        check(created, || format!("set up the client {}", name.to_string_lossy()))?;
        let cluster = Self { api, handle };
        cluster.read(config)?;
        let seconds = config.monitor_timeout.as_secs().max(1).to_string();
        cluster.set("client_mount_timeout", &seconds)?;
        cluster.set("rados_mon_op_timeout", &seconds)?;
        if let Some(keyring) = &config.keyring {
            cluster.set("keyring", path_text(keyring)?)?;
        }
        for (option, value) in &config.defaults {
            match cluster.set(option, value) {
                Err(error) if error.errno() == Some(libc::ENOENT) => {}
                set => set?,
            }
        }
        for (option, value) in &config.overrides {
            cluster.set(option, value)?;
        }
        Ok(cluster)
    }

    fn read(&self, config: &Config) -> Result<()> {
        // Not the library's own search, which includes the working directory.
        let usual = Path::new("/etc/ceph/ceph.conf");
        // Where that cannot be told it is read, and the library says why not.
        let given = || usual.try_exists().unwrap_or(true).then_some(usual);
        let Some(path) = config.conf.as_deref().or_else(given) else { return Ok(()) };
        let text = c_string(path_text(path)?, "a path")?;
        // SAFETY: the handle is open, the path a C string.
        let read = unsafe { (self.api.rados.rados_conf_read_file)(self.handle, text.as_ptr()) };
        check(read, || format!("read Ceph's configuration {}", path.display())).map(drop)
    }

    fn set(&self, option: &str, value: &str) -> Result<()> {
        let (name, text) = (c_string(option, "an option")?, c_string(value, "a value")?);
        // SAFETY: the handle is open and not connected, the texts are C strings.
        let set =
            unsafe { (self.api.rados.rados_conf_set)(self.handle, name.as_ptr(), text.as_ptr()) };
        check(set, || format!("set Ceph's option {option} to {value:?}")).map(drop)
    }

    /// The value of one of Ceph's options, as it holds for this client.
    ///
    /// # Errors
    /// When there is no such option.
    pub fn option(&self, option: &str) -> Result<String> {
        let name = c_string(option, "an option")?;
        let value = growing(
            256,
            || format!("read Ceph's option {option}"),
            |buffer, size| {
                // SAFETY: the handle is open, and `buffer` has room for `size` bytes.
                let got = unsafe {
                    (self.api.rados.rados_conf_get)(self.handle, name.as_ptr(), buffer, *size)
                };
                // It says ENAMETOOLONG where others say ERANGE.
                if got == -libc::ENAMETOOLONG { -libc::ERANGE } else { got }
            },
        )?;
        Ok(until_zero(&value))
    }

    /// The cluster's identity.
    ///
    /// # Errors
    /// What the library gives.
    pub fn fsid(&self) -> Result<String> {
        let id = growing(
            37,
            || "ask for the cluster's id".to_owned(),
            |buffer, size| {
                // SAFETY: the handle is connected, and `buffer` has room for `size` bytes.
                unsafe { (self.api.rados.rados_cluster_fsid)(self.handle, buffer, *size) }.min(0)
            },
        )?;
        Ok(until_zero(&id))
    }

    /// The addresses under which the cluster knows this client, as `IP:PORT/NONCE`: what a
    /// blocklist takes, and what lock owners and watchers are named by.
    ///
    /// # Errors
    /// What the library gives.
    pub fn addresses(&self) -> Result<String> {
        let mut text = null_mut();
        // SAFETY: the handle is connected; `text` takes a C string that is ours to free.
        let got = unsafe { (self.api.rados.rados_getaddrs)(self.handle, &raw mut text) };
        check(got, || "ask for this client's addresses".to_owned())?;
        // SAFETY: as above.
        unsafe {
            let addresses = owned(text);
            (self.api.rados.rados_buffer_free)(text);
            Ok(addresses)
        }
    }

    /// Runs a command of the monitors, given as JSON, and returns what it writes.
    ///
    /// # Errors
    /// What the monitors give, or ETIMEDOUT.
    pub fn monitor_command(&self, json: &str) -> Result<String> {
        let command = c_string(json, "a command")?;
        let commands = [command.as_ptr()];
        let (mut output, mut output_len) = (null_mut::<c_char>(), 0);
        let (mut status, mut status_len) = (null_mut::<c_char>(), 0);
        // SAFETY: one command, no input; both outputs take buffers that are ours to free, or stay
        // null.
        let returned = unsafe {
            (self.api.rados.rados_mon_command)(
                self.handle,
                commands.as_ptr().cast_mut(),
                1,
                null(),
                0,
                &raw mut output,
                &raw mut output_len,
                &raw mut status,
                &raw mut status_len,
            )
        };
        let take = |buffer: *mut c_char, len: usize| {
            if buffer.is_null() {
                return String::new();
            }
            // SAFETY: the library gave `len` bytes at `buffer`, which are freed here and only here.
            unsafe {
                let bytes = std::slice::from_raw_parts(buffer.cast::<u8>(), len);
                let text = String::from_utf8_lossy(bytes).into_owned();
                (self.api.rados.rados_buffer_free)(buffer);
                text
            }
        };
        let (output, status) = (take(output, output_len), take(status, status_len));
        check(returned, || format!("run the monitors' command {json} ({})", status.trim()))?;
        Ok(output)
    }

    /// Cuts a client off: from the moment this returns, no OSD that has heard of it takes a request
    /// from `address` any more, and none takes one from us without having heard of it.
    ///
    /// # Errors
    /// What the monitors give, or ETIMEDOUT: then it is unknown whether it holds.
    pub fn blocklist_add(&self, address: &str, expire: Duration) -> Result<()> {
        let seconds = expire.as_secs().max(1);
        self.blocklist("add", address, &format!(", \"expire\": {seconds}.0"))?;
        self.wait_for_latest_map()
    }

    /// Takes a client off the blocklist.
    ///
    /// # Errors
    /// What the monitors give, or ETIMEDOUT.
    pub fn blocklist_remove(&self, address: &str) -> Result<()> {
        self.blocklist("rm", address, "")?;
        self.wait_for_latest_map()
    }

    fn blocklist(&self, operation: &str, address: &str, more: &str) -> Result<()> {
        if !address.bytes().all(|b| b.is_ascii_alphanumeric() || b"[]:./".contains(&b)) {
            let action = format!("use {address:?} as a client's address");
            return Err(Error::invalid(action, "it is not IP:PORT/NONCE"));
        }
        // Ceph 15 knows the command by its older name only.
        let command = |word: &str| {
            format!(
                "{{\"prefix\": \"osd {word}\", \"{word}op\": \"{operation}\", \"addr\": \"{address}\"{more}}}"
            )
        };
        match self.monitor_command(&command("blocklist")) {
            Err(error) if error.errno() == Some(libc::EINVAL) => {
                self.monitor_command(&command("blacklist")).map(drop)
            }
            other => other.map(drop),
        }
    }

    /// Waits until this client knows the newest map of the OSDs; what it sends from then on carries
    /// that map's number, and no OSD serves it by an older one.
    ///
    /// # Errors
    /// What the library gives.
    pub fn wait_for_latest_map(&self) -> Result<()> {
        // SAFETY: the handle is connected.
        let waited = unsafe { (self.api.rados.rados_wait_for_latest_osdmap)(self.handle) };
        check(waited, || "wait for the newest map of the OSDs".to_owned()).map(drop)
    }

    /// The name of the pool with this number.
    ///
    /// # Errors
    /// ENOENT when there is no such pool.
    pub fn pool_name(&self, id: i64) -> Result<String> {
        let name = growing(
            128,
            || format!("ask for the name of the pool {id}"),
            |buffer, size| {
                // SAFETY: the handle is connected, and `buffer` has room for `size` bytes.
                unsafe {
                    (self.api.rados.rados_pool_reverse_lookup)(self.handle, id, buffer, *size)
                }
            },
        )?;
        Ok(until_zero(&name))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is open; pools hold this value, so none is left.
        unsafe { (self.api.rados.rados_shutdown)(self.handle) };
    }
}

impl Config {
    fn id(&self) -> &str {
        self.id.as_deref().unwrap_or("admin")
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            conf: None,
            id: None,
            keyring: None,
            defaults: Vec::new(),
            overrides: Vec::new(),
            monitor_timeout: Duration::from_secs(15),
        }
    }
}

fn path_text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| {
        Error::invalid(format!("use the path {}", path.display()), "it is not UTF-8")
    })
}
