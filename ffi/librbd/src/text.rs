//! Texts on their way to C and back.

use std::ffi::{CStr, CString, c_char};

use crate::error::{Error, Result, check};

/// The longest answer that is taken, in bytes.
const MAX_ANSWER: usize = 16 << 20;

/// A C string; `what` names the text in the error.
pub(crate) fn c_string(text: &str, what: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| Error::invalid(format!("use {text:?} as {what}"), "it has a zero byte"))
}

/// A text of the library; empty for null.
///
/// # Safety
/// `text` is null or a C string.
pub(crate) unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so by this function's contract a C string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Calls `fill` with a buffer and its size until it no longer says ERANGE, and returns the buffer.
/// `fill` may raise the size to what it needs.
pub(crate) fn growing(
    mut size: usize,
    action: impl Fn() -> String,
    mut fill: impl FnMut(*mut c_char, &mut usize) -> i32,
) -> Result<Vec<u8>> {
    loop {
        let mut buffer = vec![0_u8; size];
        let mut wanted = size;
        let returned = fill(buffer.as_mut_ptr().cast(), &mut wanted);
        if returned != -libc::ERANGE {
            check(returned, &action)?;
            return Ok(buffer);
        }
        size = wanted.max(size * 2);
        if size > MAX_ANSWER {
            return Err(Error::invalid(action(), "the answer is too long"));
        }
    }
}

/// The text at the beginning of a buffer that C has filled.
pub(crate) fn until_zero(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}

/// Texts with a zero byte after each.
pub(crate) fn texts(bytes: &[u8]) -> impl Iterator<Item = String> {
    let ended = bytes.strip_suffix(&[0]);
    ended.into_iter().flat_map(|all| {
        all.split(|byte| *byte == 0).map(|text| String::from_utf8_lossy(text).into_owned())
    })
}
