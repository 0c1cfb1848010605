//! Loads the libraries and fills the tables.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use crate::table::{Librados, Librbd};

/// The functions of both libraries.
#[derive(Debug)]
pub struct Api {
    pub rados: Librados,
    pub rbd: Librbd,
}

/// The libraries cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LoadError {
    /// A library, or a library that it needs, is missing. `absent` means that the library itself is.
    #[error("cannot load the library {library}: {reason}")]
    Library { library: &'static str, package: &'static str, absent: bool, reason: String },
    /// A library is too old.
    #[error("the library {library} lacks the function {symbol}: it is older than Ceph 15")]
    Symbol { library: &'static str, package: &'static str, symbol: &'static str },
}

impl LoadError {
    /// Returns whether a library is not installed. `false` for an installed library that is broken.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Library { absent: true, .. })
    }

    /// Returns a hint how to repair it.
    pub fn repair(&self) -> String {
        match self {
            Self::Library { package, .. } => {
                format!("install {package} (apt install {package}, dnf install {package})")
            }
            Self::Symbol { package, .. } => {
                format!("update {package} to Ceph 15 (Octopus) or newer")
            }
        }
    }
}

/// Returns the functions of the libraries, which the first call loads. Blocks while they load. After a
/// failure the next call tries again, so that no restart is needed after an installation.
///
/// # Errors
/// Returns an error if a library is missing or too old.
pub fn api() -> Result<&'static Api, LoadError> {
    static API: OnceLock<Api> = OnceLock::new();
    if let Some(api) = API.get() {
        return Ok(api);
    }
    let loaded = load(c"librados.so.2", c"librbd.so.1")?;
    // Two threads that load at the same time get the same libraries and equal tables.
    Ok(API.get_or_init(|| loaded))
}

/// Loads the libraries with these file names. [`api`] uses the usual ones.
///
/// # Errors
/// Returns an error if a library is missing or too old.
pub fn load(librados: &CStr, librbd: &CStr) -> Result<Api, LoadError> {
    // librbd needs librados. librados is loaded first, so that it is the one that is named if both are
    // missing.
    // The package of librbd depends on that of librados, so it is the only one that a user has to install.
    let rados = Library::open(librados, "librados.so.2", "librbd1")?;
    let rbd = Library::open(librbd, "librbd.so.1", "librbd1")?;
    // SAFETY: these are Ceph's libraries by their sonames, which identify the ABI. They stay loaded for
    // the rest of the process (RTLD_NODELETE).
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
        // RTLD_NODELETE: the library has threads and thread-local destructors and must not be unloaded.
        // RTLD_LOCAL: its symbols must not replace those of other libraries.
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: `path` is a C string. This runs the library's initialisers, which in Ceph only set its
        // own statics.
        let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
        if handle.is_null() {
            let reason = last_error();
            // If a library that it needs is missing, the text names that one.
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

/// Returns the last error of the dynamic linker on this thread.
fn last_error() -> String {
    // SAFETY: dlerror returns null or a C string that is valid until this thread's next call of it.
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
