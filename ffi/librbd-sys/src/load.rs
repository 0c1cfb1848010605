//! Finds the libraries and fills the tables.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use crate::table::{Librados, Librbd};

/// Both libraries, ready to be called.
#[derive(Debug)]
pub struct Api {
    pub rados: Librados,
    pub rbd: Librbd,
}

/// Why there is no [`Api`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LoadError {
    /// A library is missing, or one that it needs.
    #[error("the library {library} cannot be loaded: {reason}")]
    Library { library: &'static str, package: &'static str, absent: bool, reason: String },
    /// A library is too old.
    #[error("the library {library} has no {symbol}; it is older than Ceph 15")]
    Symbol { library: &'static str, package: &'static str, symbol: &'static str },
}

impl LoadError {
    /// Whether a library is just not there, and nothing is wrong with one that is.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Library { absent: true, .. })
    }

    /// What repairs it.
    pub fn repair(&self) -> String {
        match self {
            Self::Library { package, .. } => {
                format!("install {package} (apt install {package}, dnf install {package})")
            }
            Self::Symbol { package, .. } => {
                format!("update {package}; Ceph 15 (Octopus) or newer is needed")
            }
        }
    }
}

/// The libraries, loaded with the first call. Blocks while they load. A failure is not remembered,
/// so that an installation repairs it.
///
/// # Errors
/// When a library is missing or too old.
pub fn api() -> Result<&'static Api, LoadError> {
    static API: OnceLock<Api> = OnceLock::new();
    if let Some(api) = API.get() {
        return Ok(api);
    }
    let loaded = load(c"librados.so.2", c"librbd.so.1")?;
    // Two threads that load at once get the same libraries, so either table will do.
    Ok(API.get_or_init(|| loaded))
}

/// Loads libraries by these names; [`api`] does so with the usual ones.
///
/// # Errors
/// As [`api`].
pub fn load(librados: &CStr, librbd: &CStr) -> Result<Api, LoadError> {
    // librbd needs librados, which is then the same one, and is named first where it is missing.
    let rados = Library::open(librados, "librados.so.2", "librados2")?;
    let rbd = Library::open(librbd, "librbd.so.1", "librbd1")?;
    // SAFETY: these are Ceph's libraries, by their sonames, whose ABI the sonames stand for; they
    // stay loaded for the rest of the process (RTLD_NODELETE).
    let tables = unsafe {
        (
            Librados::fill(|name| rados.find(name)).map_err(|name| rados.lacks(name)),
            Librbd::fill(|name| rbd.find(name)).map_err(|name| rbd.lacks(name)),
        )
    };
    Ok(Api { rados: tables.0?, rbd: tables.1? })
}

struct Library {
    handle: *mut c_void,
    name: &'static str,
    package: &'static str,
}

impl Library {
    fn open(path: &CStr, name: &'static str, package: &'static str) -> Result<Self, LoadError> {
        // Never unloaded: it has threads and thread-local destructors of its own. Not global, so
        // that its symbols stand in for nobody else's.
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: `path` is a C string. The library's initialisers run: those of Ceph only set up
        // its own statics.
        let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
        if handle.is_null() {
            let reason = last_error();
            // Of another file, which it needs, it would say so of that one.
            let absent = format!("{}: cannot open shared object file", path.to_string_lossy());
            let absent = reason.starts_with(&absent);
            return Err(LoadError::Library { library: name, package, absent, reason });
        }
        Ok(Self { handle, name, package })
    }

    fn find(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is open, the name a C string.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }

    fn lacks(&self, symbol: &'static CStr) -> LoadError {
        let symbol = symbol.to_str().unwrap_or("a symbol");
        LoadError::Symbol { library: self.name, package: self.package, symbol }
    }
}

/// What the dynamic linker says, for this thread.
fn last_error() -> String {
    // SAFETY: dlerror gives null or a C string that lasts until this thread's next call of it.
    let text = unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            None
        } else {
            Some(CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    text.unwrap_or_else(|| "no reason given".to_owned())
}
