//! The exclusive lock of an image, its holders, and the image's watchers.

use std::ffi::{CStr, CString, c_char};
use std::ptr::null_mut;

use librbd_sys::{RBD_LOCK_MODE_EXCLUSIVE, rbd_image_watcher_t};

use crate::error::{Error, Result, check};
use crate::image::Image;
use crate::list::listed;
use crate::text::{c_string, owned, texts};

/// A client that has the image open for writing, or that reads it and watches for changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watcher {
    /// The address, as [`crate::Cluster::addresses`] returns it.
    pub address: String,
    /// The client's number.
    pub client: i64,
}

/// A client that holds a lock on the image's header: librbd's exclusive lock, or one that another tool
/// took with another cookie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Locker {
    /// `client.NUMBER`
    pub client: String,
    /// The cookie of the lock: `auto NUMBER` for librbd's exclusive lock.
    pub cookie: String,
    pub address: String,
}

impl Locker {
    fn new(client: String, cookie: String, address: &str) -> Self {
        // Only this list has the kind of the address in front of it.
        let bare = ["v1:", "v2:", "any:"].iter().find_map(|kind| address.strip_prefix(kind));
        Self { client, cookie, address: bare.unwrap_or(address).to_owned() }
    }
}

/// librbd's name of an image's lock (`RBD_LOCK_NAME`).
pub(crate) const LOCK: &CStr = c"rbd_lock";

/// The maximum length of the list of lockers' names, in bytes.
const MAX_NAMES: usize = 16 << 20;

impl Image {
    /// Acquires the exclusive lock and keeps it. A lock that librbd acquired for a write is passed on when
    /// another client requests it; this one is not. If the present owner does not watch the image any
    /// more, librbd blocklists it and breaks its lock. An owner that acquired the lock for a write passes
    /// it on.
    ///
    /// # Errors
    /// Returns EROFS or EBUSY if another client keeps the lock, and EINVAL if the image does not have the
    /// feature.
    pub fn lock_acquire(&self) -> Result<()> {
        // SAFETY: the image is open.
        let returned =
            unsafe { (self.api().rbd_lock_acquire)(self.raw(), RBD_LOCK_MODE_EXCLUSIVE) };
        check(returned, || "acquire the image's exclusive lock".to_owned()).map(drop)
    }

    /// Releases the lock after the requests in flight have ended. Closing the image does it, too.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn lock_release(&self) -> Result<()> {
        // SAFETY: the image is open.
        let returned = unsafe { (self.api().rbd_lock_release)(self.raw()) };
        check(returned, || "release the image's exclusive lock".to_owned()).map(drop)
    }

    /// Returns whether this handle holds the lock, by its local state.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn is_lock_owner(&self) -> Result<bool> {
        let mut owner = 0;
        // SAFETY: the image is open.
        let returned =
            unsafe { (self.api().rbd_is_exclusive_lock_owner)(self.raw(), &raw mut owner) };
        check(returned, || "check whether this client holds the lock".to_owned())?;
        Ok(owner != 0)
    }

    /// Returns the addresses of the clients that hold the lock: none or one.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn lock_owners(&self) -> Result<Vec<String>> {
        let action = || "read the lock's owner".to_owned();
        let mut mode = 0;
        let owners = listed(null_mut::<c_char>(), action, |entries, count| {
            // SAFETY: the image is open, and there is room for `count` texts.
            unsafe { (self.api().rbd_lock_get_owners)(self.raw(), &raw mut mode, entries, count) }
        });
        let mut owners = match owners {
            Err(error) if error.errno() == Some(libc::ENOENT) => return Ok(Vec::new()),
            owners => owners?,
        };
        // SAFETY: the library filled these with C strings; the clean-up frees them and nothing else.
        unsafe {
            let found = owners.iter().map(|owner| owned(*owner)).collect();
            (self.api().rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), owners.len());
            Ok(found)
        }
    }

    /// Lists the clients that hold a lock.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn lockers(&self) -> Result<Vec<Locker>> {
        let action = || "list the image's locks".to_owned();
        let header = self.header()?;
        let mut sizes = [64, 256, 256, 256];
        loop {
            let mut buffers = sizes.map(|size| vec![0_u8; size]);
            let [tag, clients, cookies, addresses] = &mut buffers;
            let [tag_len, clients_len, cookies_len, addresses_len] = &mut sizes;
            let mut exclusive = 0;
            // librados is used because librbd's own list may be outdated.
            // SAFETY: the pool is open, the names are C strings, and each buffer has the length that is
            // passed with it.
            let returned = unsafe {
                (self.pool().cluster().api.rados.rados_list_lockers)(
                    self.pool().raw(),
                    header.as_ptr(),
                    LOCK.as_ptr(),
                    &raw mut exclusive,
                    tag.as_mut_ptr().cast(),
                    tag_len,
                    clients.as_mut_ptr().cast(),
                    clients_len,
                    cookies.as_mut_ptr().cast(),
                    cookies_len,
                    addresses.as_mut_ptr().cast(),
                    addresses_len,
                )
            };
            if returned == -(libc::ERANGE as isize) {
                if sizes.iter().any(|size| *size > MAX_NAMES) {
                    return Err(Error::invalid(action(), "the answer is too long"));
                }
                // A length that was sufficient may come back as the part that was used.
                sizes = std::array::from_fn(|n| sizes[n].max(buffers[n].len()));
                continue;
            }
            check(i32::try_from(returned).unwrap_or(-libc::EIO), action)?;
            // Without a locker, the lengths are unchanged.
            let count = usize::try_from(returned).unwrap_or(0);
            let names = |n: usize| {
                let used = sizes[n].min(buffers[n].len());
                texts(&buffers[n][..used]).collect::<Vec<_>>()
            };
            let (clients, cookies, addresses) = (names(1), names(2), names(3));
            let all = clients.into_iter().zip(cookies).zip(addresses).take(count);
            return Ok(all
                .map(|((client, cookie), address)| Locker::new(client, cookie, &address))
                .collect());
        }
    }

    /// Breaks the lock of `owner`, which must have been blocklisted before. (librbd's own function would
    /// blocklist it once more, by default for an hour, which replaces any longer time. In 16.2 it fails
    /// with EINVAL for any other time.)
    ///
    /// # Errors
    /// Returns EBUSY if another client has the lock, ENOENT if none has, or another error of the library.
    pub fn lock_break(&self, owner: &str) -> Result<()> {
        let action = || format!("break the lock of {owner}");
        let lockers = self.lockers()?;
        let Some(locker) = lockers.iter().find(|locker| locker.address == owner) else {
            let errno = if lockers.is_empty() { libc::ENOENT } else { libc::EBUSY };
            return Err(Error::new(action(), errno));
        };
        let header = self.header()?;
        let client = c_string(&locker.client, "a client")?;
        let cookie = c_string(&locker.cookie, "a cookie")?;
        // SAFETY: the pool is open, the names are C strings.
        let returned = unsafe {
            (self.pool().cluster().api.rados.rados_break_lock)(
                self.pool().raw(),
                header.as_ptr(),
                LOCK.as_ptr(),
                client.as_ptr(),
                cookie.as_ptr(),
            )
        };
        check(returned, action).map(drop)
    }

    /// Returns the name of the object with the image's lock and metadata.
    pub(crate) fn header(&self) -> Result<CString> {
        c_string(&format!("rbd_header.{}", self.id()?), "an object's name")
    }

    /// Lists the watchers of the image. A dead client is listed until the OSDs drop its watch, after 30 s
    /// by default.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn watchers(&self) -> Result<Vec<Watcher>> {
        let action = || "list the image's watchers".to_owned();
        let none = rbd_image_watcher_t { addr: null_mut(), id: 0, cookie: 0 };
        let mut watchers = listed(none, action, |entries, count| {
            // SAFETY: the image is open, and there is room for `count` entries.
            unsafe { (self.api().rbd_watchers_list)(self.raw(), entries, count) }
        })?;
        // SAFETY: the library filled these; the clean-up frees their texts.
        unsafe {
            let found = watchers.iter();
            let found = found.map(|w| Watcher { address: owned(w.addr), client: w.id }).collect();
            (self.api().rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), watchers.len());
            Ok(found)
        }
    }
}
