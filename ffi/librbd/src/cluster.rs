//! A connection to a cluster: one RADOS client.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

use librbd_sys::{Api, api, rados_t};

use crate::error::{Error, Result, Subject, check};
use crate::text::{c_string, growing, owned, until_zero};

/// The address of a cluster and the identity of the client. It contains no secret: the library reads the
/// key from a file, or [`Cluster::connect_with_key`] passes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The configuration file. The default is `/etc/ceph/ceph.conf` if that exists.
    pub conf: Option<PathBuf>,
    /// The client's name without `client.`. The default is `admin`.
    pub id: Option<String>,
    /// The file with the client's key. The default is the path in the configuration.
    pub keyring: Option<PathBuf>,
    /// Options of Ceph that override the configuration file. Options unknown to the library are skipped.
    pub defaults: Vec<(String, String)>,
    /// Options of Ceph that override the file and the defaults. An unknown option is an error.
    pub overrides: Vec<(String, String)>,
    /// The timeout for answers of the monitors, when connecting and later.
    pub monitor_timeout: Duration,
    /// Whether the library writes nothing to stderr. Otherwise it writes its own lines about errors there.
    pub quiet: bool,
}

/// A connected client. Its pools and images keep it; the last of them disconnects it.
#[derive(Debug)]
pub struct Cluster {
    pub(crate) api: &'static Api,
    pub(crate) handle: rados_t,
}

/// An option that exactly those libraries have that decode keys of the type aes256k: 20.2.4 has it, 16.2.15 and 18.2.7 have
/// not.
const OF_AES256K: &str = "mon_auth_allow_insecure_key";

// SAFETY: several threads may use a rados_t at once (librados.h: all functions are thread safe except
// those that change an ioctx). Its configuration is only set before it is shared.
unsafe impl Send for Cluster {}
// SAFETY: see above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Connects to the cluster. Blocks at most for about the monitors' timeout.
    ///
    /// # Errors
    /// Returns an error if the libraries are missing, the configuration is invalid, the monitors refuse
    /// the key, or no monitor answers within the timeout.
    pub fn connect(config: &Config) -> Result<Arc<Self>> {
        Self::configured(config)?.connected(config)
    }

    /// Connects to the cluster with a key in base64. The library reads no keyring. It keeps the key in its
    /// memory, and logs it if it cannot decode it: the caller checks the key first, and says whether it is of the type
    /// aes256k, which only newer libraries decode. The key of a connected client cannot be replaced, because the
    /// library reads it only when it connects.
    ///
    /// # Errors
    /// Fails as [`Cluster::connect`] does, and with an error about [`Subject::Key`] if the library cannot decode the key.
    pub fn connect_with_key(config: &Config, key: &CStr, is_aes256k: bool) -> Result<Arc<Self>> {
        let cluster = Self::configured(config)?;
        if is_aes256k && cluster.option(OF_AES256K).is_err() {
            let what = "the installed librados is too old for keys of the type aes256k";
            return Err(Error::unsupported("use the client's key", what).about(Subject::Key));
        }
        cluster.set("keyring", "")?;
        // SAFETY: the handle is open and not connected, and the texts are C strings.
        let set = unsafe {
            (cluster.api.rados.rados_conf_set)(cluster.handle, c"key".as_ptr(), key.as_ptr())
        };
        check(set, || "set the client's key".to_owned())?;
        cluster.connected(config)
    }

    fn connected(self, config: &Config) -> Result<Arc<Self>> {
        // SAFETY: the handle is open and not connected yet.
        check(unsafe { (self.api.rados.rados_connect)(self.handle) }, || {
            format!("connect to the cluster as client.{}", config.id())
        })
        .map_err(|error| error.about(Subject::Connection))?;
        Ok(Arc::new(self))
    }

    fn configured(config: &Config) -> Result<Self> {
        let api = api().map_err(Error::no_library)?;
        let name = c_string(&format!("client.{}", config.id()), "a client's name")?;
        let mut handle = null_mut();
        // SAFETY: the texts are C strings, and `handle` receives the new client.
        let created = unsafe {
            (api.rados.rados_create2)(&raw mut handle, c"ceph".as_ptr(), name.as_ptr(), 0)
        };
        check(created, || format!("set up the client {}", name.to_string_lossy()))?;
        let cluster = Self { api, handle };
        if config.quiet {
            // First of all: the library also reports errors in the configuration file.
            cluster.silence()?;
        }
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

    fn silence(&self) -> Result<()> {
        self.set("err_to_stderr", "false")?;
        self.set("log_to_stderr", "false")?;
        // The library's log takes a changed option over when arguments are parsed (ConfigProxy::apply_changes),
        // here those of a program without any.
        let mut arguments = [c"cleat".as_ptr()];
        // SAFETY: the handle is open and not connected, and the array has the one C string that is announced.
        let parsed = unsafe {
            (self.api.rados.rados_conf_parse_argv)(self.handle, 1, arguments.as_mut_ptr())
        };
        check(parsed, || "silence Ceph's log".to_owned()).map(drop)
    }

    fn read(&self, config: &Config) -> Result<()> {
        // The library's own search is not used, because it includes the working directory.
        let usual = Path::new("/etc/ceph/ceph.conf");
        // If it is unknown whether the file exists, the library reads it and reports the reason.
        let default = || usual.try_exists().unwrap_or(true).then_some(usual);
        let Some(path) = config.conf.as_deref().or_else(default) else { return Ok(()) };
        let text = c_string(path_text(path)?, "a path")?;
        // SAFETY: the handle is open, and the path is a C string.
        let read = unsafe { (self.api.rados.rados_conf_read_file)(self.handle, text.as_ptr()) };
        check(read, || format!("read Ceph's configuration {}", path.display()))
            .map(drop)
            .map_err(|error| error.about(Subject::Configuration))
    }

    fn set(&self, option: &str, value: &str) -> Result<()> {
        let (name, text) = (c_string(option, "an option")?, c_string(value, "a value")?);
        // SAFETY: the handle is open and not connected, the texts are C strings.
        let set =
            unsafe { (self.api.rados.rados_conf_set)(self.handle, name.as_ptr(), text.as_ptr()) };
        check(set, || format!("set Ceph's option {option} to {value:?}"))
            .map(drop)
            .map_err(|error| error.about(Subject::Option))
    }

    /// Returns the effective value of an option of Ceph for this client.
    ///
    /// # Errors
    /// Returns an error if there is no such option.
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
                // This function returns ENAMETOOLONG instead of ERANGE.
                if got == -libc::ENAMETOOLONG { -libc::ERANGE } else { got }
            },
        )?;
        Ok(until_zero(&value))
    }

    /// Returns the cluster's id.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn fsid(&self) -> Result<String> {
        let id = growing(
            37,
            || "read the cluster's id".to_owned(),
            |buffer, size| {
                // SAFETY: the handle is connected, and `buffer` has room for `size` bytes.
                unsafe { (self.api.rados.rados_cluster_fsid)(self.handle, buffer, *size) }.min(0)
            },
        )?;
        Ok(until_zero(&id))
    }

    /// Returns the address of this client in the cluster, as `IP:PORT/NONCE`. The blocklist, lock owners
    /// and watchers use the same form.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn addresses(&self) -> Result<String> {
        let mut text = null_mut();
        // SAFETY: the handle is connected; `text` receives a C string that this function frees.
        let got = unsafe { (self.api.rados.rados_getaddrs)(self.handle, &raw mut text) };
        check(got, || "read this client's addresses".to_owned())?;
        // SAFETY: see above.
        unsafe {
            let addresses = owned(text);
            (self.api.rados.rados_buffer_free)(text);
            Ok(addresses)
        }
    }

    /// Runs a command of the monitors, given as JSON, and returns its output.
    ///
    /// # Errors
    /// Returns the monitors' error, or ETIMEDOUT.
    pub fn monitor_command(&self, json: &str) -> Result<String> {
        let command = c_string(json, "a command")?;
        let commands = [command.as_ptr()];
        let (mut output, mut output_len) = (null_mut::<c_char>(), 0);
        let (mut status, mut status_len) = (null_mut::<c_char>(), 0);
        // SAFETY: one command, no input; both outputs receive buffers that are freed below, or stay
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
            // SAFETY: the library has returned `len` bytes at `buffer`, which are freed only here.
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

    /// Puts the client at `address` on the blocklist. An OSD with the new OSD map refuses requests from
    /// `address`. After this call, every OSD gets the new map before it serves a request of this client.
    ///
    /// # Errors
    /// Returns the monitors' error, or ETIMEDOUT. After ETIMEDOUT it is unknown whether the client is on
    /// the blocklist.
    pub fn blocklist_add(&self, address: &str, expire: Duration) -> Result<()> {
        let seconds = expire.as_secs().max(1);
        self.blocklist("add", address, &format!(", \"expire\": {seconds}.0"))?;
        self.wait_for_latest_map()
    }

    /// Removes the client at `address` from the blocklist.
    ///
    /// # Errors
    /// Returns the monitors' error, or ETIMEDOUT.
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

    /// Waits until this client has the newest OSD map. Its later requests carry the number of that map, and
    /// no OSD serves them with an older map.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn wait_for_latest_map(&self) -> Result<()> {
        // SAFETY: the handle is connected.
        let waited = unsafe { (self.api.rados.rados_wait_for_latest_osdmap)(self.handle) };
        check(waited, || "wait for the newest OSD map".to_owned()).map(drop)
    }

    /// Returns the name of the pool with the number `id`.
    ///
    /// # Errors
    /// Returns ENOENT if there is no such pool.
    pub fn pool_name(&self, id: i64) -> Result<String> {
        let name = growing(
            128,
            || format!("read the name of the pool {id}"),
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
        // SAFETY: the handle is open. Pools keep this value, so none of them is left.
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
            quiet: false,
        }
    }
}

fn path_text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| {
        Error::invalid(format!("use the path {}", path.display()), "it is not UTF-8")
    })
}
