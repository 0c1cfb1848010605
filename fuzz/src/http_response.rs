//! Responses of an object store, or of what answers in its place.

use std::io::{self, Read};

use cleat_object_backend::read_http_response;

/// The maximum length of a body in bytes.
const BODY_MAX: usize = 4096;

/// Returns few bytes at a time.
struct Pieces<'a>(&'a [u8], usize);

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (now, later) = self.0.split_at(self.1.min(self.0.len()).min(buffer.len()));
        buffer[..now.len()].copy_from_slice(now);
        self.0 = later;
        Ok(now.len())
    }
}

/// Checks that a response is the same in any pieces, and that its body is bounded and is a part of the input.
pub(crate) fn check(data: &[u8]) {
    let Some((status, body)) = read_http_response(&mut Pieces(data, 1), BODY_MAX) else { return };
    assert!(body.len() <= BODY_MAX && body.len() <= data.len());
    assert!((200..1000).contains(&status) || status < 100, "{status}");
    let again = read_http_response(&mut Pieces(data, 7), BODY_MAX);
    // What follows a response depends on how much of it was read.
    if let Some(again) = again {
        assert_eq!(again, (status, body));
    }
}
