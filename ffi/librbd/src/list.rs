//! Reads lists of the library whose length is not known in advance.

use std::ffi::c_int;

use crate::error::{Error, Result, check};

/// The maximum number of entries of a list.
const MAX_ENTRIES: usize = 1 << 20;

/// Calls `fill` with an array of `empty` entries and its length, with a larger array as long as `fill`
/// returns ERANGE and a larger length. Returns the entries that `fill` wrote. The caller must clean up
/// what the entries point to.
pub(crate) fn listed<T: Copy>(
    empty: T,
    action: impl Fn() -> String,
    mut fill: impl FnMut(*mut T, &mut usize) -> c_int,
) -> Result<Vec<T>> {
    let mut room = 64;
    loop {
        let mut entries = vec![empty; room];
        let mut count = room;
        let returned = fill(entries.as_mut_ptr(), &mut count);
        if returned == -libc::ERANGE && count > room {
            if count > MAX_ENTRIES {
                return Err(Error::invalid(action(), "there are too many"));
            }
            room = count;
            continue;
        }
        check(returned, &action)?;
        entries.truncate(count);
        return Ok(entries);
    }
}
