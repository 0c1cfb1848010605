//! Lists that the library makes: of as many entries as there are, which nobody knows before.

use std::ffi::c_int;

use crate::error::{Error, Result, check};

/// Most entries that are taken of any list.
const MOST: usize = 1 << 20;

/// Calls `fill` with room for some entries, `empty` ones, and with how many these are, until it no longer
/// says ERANGE and a larger number; returns what it filled. What the entries point to is the caller's to
/// clean up.
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
            if count > MOST {
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
