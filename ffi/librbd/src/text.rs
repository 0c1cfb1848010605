//! Converts texts to and from C.

use std::ffi::{CStr, CString, c_char};

use crate::error::{Error, Result, check};

/// The maximum length of an answer, in bytes.
const MAX_ANSWER: usize = 16 << 20;

/// Converts `text` to a C string. `what` names the text in the error.
pub(crate) fn c_string(text: &str, what: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| Error::invalid(format!("use {text:?} as {what}"), "it has a zero byte"))
}

/// Copies a text of the library. Returns an empty text for null.
///
/// # Safety
/// `text` must be null or a C string.
pub(crate) unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so by this function's contract a C string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Calls `fill` with a buffer and its size, with a larger buffer as long as `fill` returns ERANGE. Returns
/// the buffer. `fill` may set the size that it needs.
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

/// Returns the zero-terminated text at the start of a buffer.
pub(crate) fn until_zero(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}

/// Splits a list of zero-terminated texts.
pub(crate) fn texts(bytes: &[u8]) -> impl Iterator<Item = String> {
    let ended = bytes.strip_suffix(&[0]);
    ended.into_iter().flat_map(|all| {
        all.split(|byte| *byte == 0).map(|text| String::from_utf8_lossy(text).into_owned())
    })
}
