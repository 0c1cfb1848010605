//! HTTP/1.1 over one connection: a request, and its response within bounds.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};

/// The timeout of a connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum length of the head of a response, in bytes.
pub(crate) const MAX_HEAD_BYTES: usize = 64 << 10;

/// The maximum number of fields in the head of a response.
const MAX_FIELDS: usize = 64;

/// The maximum length of the line with the length of a chunk, in bytes.
const MAX_CHUNK_LINE_BYTES: usize = 1 << 10;

/// The bytes that one read may return.
const READ_BYTES: usize = 32 << 10;

/// A request. The fields include `host` and `content-length`.
pub(crate) struct Request<'a> {
    pub(crate) method: &'static str,
    /// The path with the query, encoded.
    pub(crate) target: &'a str,
    pub(crate) fields: &'a [(&'static str, String)],
    pub(crate) body: &'a [u8],
}

/// A response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    /// Whether the connection can be used again.
    pub(crate) is_reusable: bool,
}

/// A connection to a server.
pub(crate) struct Connection {
    stream: TcpStream,
    deadline: Instant,
}

impl Connection {
    /// Connects to a host, which is a name or an address.
    ///
    /// # Errors
    /// Returns the error of the last address.
    pub(crate) fn open(host: &str, port: u16, deadline: Instant) -> io::Result<Self> {
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        for address in (host, port).to_socket_addrs()? {
            match Self::open_at(address, deadline) {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn open_at(address: SocketAddr, deadline: Instant) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, left(deadline)?.min(CONNECT_TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, deadline })
    }

    /// Sets the moment until which calls may take.
    pub(crate) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Sends a request and reads its response, whose body has at most `max_body` bytes.
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline, `UnexpectedEof` if the server has closed the connection, `InvalidData` for
    /// a response that is malformed or too long, and the error of the socket otherwise.
    pub(crate) fn call(&mut self, request: &Request<'_>, max_body: usize) -> io::Result<Response> {
        let mut head = format!("{} {} HTTP/1.1\r\n", request.method, request.target);
        for (name, value) in request.fields {
            head.push_str(name);
            head.push_str(": ");
            head.push_str(value);
            head.push_str("\r\n");
        }
        head.push_str("\r\n");
        self.send(head.as_bytes())?;
        self.send(request.body)?;
        read_response(&mut *self, max_body)
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(left(self.deadline)?))?;
            let sent = self.stream.write(bytes).map_err(as_timeout)?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(left(self.deadline)?))?;
        self.stream.read(buffer).map_err(as_timeout)
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(SystemClock.now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A socket reports its timeout as `WouldBlock`.
fn as_timeout(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { error }
}

/// How long the body of a response is.
enum Length {
    Bytes(usize),
    Chunks,
    UntilClosed,
}

/// Reads a response.
///
/// # Errors
/// Returns `InvalidData` for a response that is malformed or whose body is longer than `max_body`, `UnexpectedEof` if
/// it ends too early, and the error of the read otherwise.
pub(crate) fn read_response(from: &mut impl Read, max_body: usize) -> io::Result<Response> {
    loop {
        let (status, length, is_kept, mut rest) = read_head(from)?;
        // An interim response has no body, and another response follows.
        if (100..200).contains(&status) {
            if rest.is_empty() {
                continue;
            }
            return Err(invalid("an interim response has a body"));
        }
        let body = match length {
            _ if matches!(status, 204 | 304) => Vec::new(),
            Length::Bytes(bytes) if bytes > max_body => {
                return Err(invalid("the body is too long"));
            }
            Length::Bytes(bytes) => {
                fill(from, &mut rest, bytes)?;
                rest.truncate(bytes);
                rest
            }
            Length::Chunks => read_chunks(from, rest, max_body)?,
            Length::UntilClosed => read_to_end(from, rest, max_body)?,
        };
        let is_reusable = is_kept && !matches!(length, Length::UntilClosed);
        return Ok(Response { status, body, is_reusable });
    }
}

/// Reads the head of a response. Returns also what follows it, as far as it has been read.
fn read_head(from: &mut impl Read) -> io::Result<(u16, Length, bool, Vec<u8>)> {
    let mut bytes = Vec::new();
    loop {
        let before = bytes.len();
        read_some(from, &mut bytes)?;
        if bytes.len() == before {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut head = httparse::Response::new(&mut fields);
        match head.parse(&bytes).map_err(|_| invalid("the head is malformed"))? {
            httparse::Status::Complete(end) => {
                let status = head.code.ok_or_else(|| invalid("there is no status"))?;
                let (length, is_kept) = framing(head.version == Some(1), head.headers)?;
                return Ok((status, length, is_kept, bytes.split_off(end)));
            }
            httparse::Status::Partial if bytes.len() > MAX_HEAD_BYTES => {
                return Err(invalid("the head is too long"));
            }
            httparse::Status::Partial => {}
        }
    }
}

/// Returns how long the body is, and whether the connection stays open (RFC 9112, 6.3 and 9.3).
fn framing(is_1_1: bool, fields: &[httparse::Header<'_>]) -> io::Result<(Length, bool)> {
    let (mut length, mut is_kept) = (None, is_1_1);
    let mut chunks = false;
    for field in fields {
        let value = std::str::from_utf8(field.value).unwrap_or_default().trim();
        if field.name.eq_ignore_ascii_case("content-length") {
            let bytes = value.parse().ok().filter(|_| value.bytes().all(|b| b.is_ascii_digit()));
            let bytes: usize = bytes.ok_or_else(|| invalid("the length is malformed"))?;
            if length.is_some_and(|before| before != bytes) {
                return Err(invalid("it has two lengths"));
            }
            length = Some(bytes);
        } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(invalid("the transfer encoding is unknown"));
            }
            chunks = true;
        } else if field.name.eq_ignore_ascii_case("connection") {
            is_kept = is_kept && !value.eq_ignore_ascii_case("close");
        }
    }
    let length = match (chunks, length) {
        (true, None) => Length::Chunks,
        (true, Some(_)) => return Err(invalid("it has a length and chunks")),
        (false, Some(bytes)) => Length::Bytes(bytes),
        (false, None) => Length::UntilClosed,
    };
    Ok((length, is_kept))
}

/// Reads the chunks of a body. `rest` is what has been read behind the head.
fn read_chunks(from: &mut impl Read, mut rest: Vec<u8>, max_body: usize) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = read_line(from, &mut rest)?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        let is_hex = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bytes = usize::from_str_radix(digits, 16).ok().filter(|_| is_hex);
        let bytes = bytes.ok_or_else(|| invalid("the length of a chunk is malformed"))?;
        if bytes > max_body - body.len() {
            return Err(invalid("the body is too long"));
        }
        if bytes == 0 {
            return skip_trailer(from, &mut rest).map(|()| body);
        }
        fill(from, &mut rest, bytes + 2)?;
        if &rest[bytes..bytes + 2] != b"\r\n" {
            return Err(invalid("a chunk has another length"));
        }
        body.extend_from_slice(&rest[..bytes]);
        rest.drain(..bytes + 2);
    }
}

fn skip_trailer(from: &mut impl Read, rest: &mut Vec<u8>) -> io::Result<()> {
    for _ in 0..MAX_FIELDS {
        if read_line(from, rest)?.is_empty() {
            return match rest.is_empty() {
                true => Ok(()),
                false => Err(invalid("bytes follow the body")),
            };
        }
    }
    Err(invalid("the trailer is too long"))
}

fn read_line(from: &mut impl Read, rest: &mut Vec<u8>) -> io::Result<String> {
    loop {
        if let Some(end) = rest.windows(2).position(|pair| pair == b"\r\n") {
            let line = String::from_utf8_lossy(&rest[..end]).into_owned();
            rest.drain(..end + 2);
            return Ok(line);
        }
        if rest.len() > MAX_CHUNK_LINE_BYTES {
            return Err(invalid("a line of the body is too long"));
        }
        fill(from, rest, rest.len() + 1)?;
    }
}

fn read_to_end(from: &mut impl Read, mut body: Vec<u8>, max_body: usize) -> io::Result<Vec<u8>> {
    loop {
        let before = body.len();
        if before > max_body {
            return Err(invalid("the body is too long"));
        }
        read_some(from, &mut body)?;
        if body.len() == before {
            return Ok(body);
        }
    }
}

/// Reads until `bytes` has `length` bytes or more.
fn fill(from: &mut impl Read, bytes: &mut Vec<u8>, length: usize) -> io::Result<()> {
    while bytes.len() < length {
        let before = bytes.len();
        read_some(from, bytes)?;
        if bytes.len() == before {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

/// Appends what one read returns; nothing at the end.
fn read_some(from: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<()> {
    let before = bytes.len();
    bytes.resize(before + READ_BYTES, 0);
    let read = loop {
        match from.read(&mut bytes[before..]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => break other,
        }
    };
    bytes.truncate(before + *read.as_ref().unwrap_or(&0));
    read.map(drop)
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("the response is invalid: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns one byte at a time, as a slow server does.
    struct Slow<'a>(&'a [u8]);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let Some((first, rest)) = self.0.split_first() else { return Ok(0) };
            buffer[0] = *first;
            self.0 = rest;
            Ok(1)
        }
    }

    fn parse(text: &str, max_body: usize) -> io::Result<Response> {
        let whole = read_response(&mut text.as_bytes(), max_body);
        let slow = read_response(&mut Slow(text.as_bytes()), max_body);
        match (&whole, &slow) {
            (Ok(one), Ok(other)) => assert_eq!(one, other, "{text}"),
            (Err(one), Err(other)) => assert_eq!(one.kind(), other.kind(), "{text}"),
            _ => panic!("{text}: {whole:?} {slow:?}"),
        }
        whole
    }

    #[test]
    fn bodies_of_each_framing_are_read() {
        for (text, status, body, is_reusable) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, "hello", true),
            ("HTTP/1.1 412 No\r\ncontent-length: 0\r\n\r\n", 412, "", true),
            ("HTTP/1.1 204 No Content\r\n\r\n", 204, "", false),
            ("HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, "ok", false),
            ("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it", 200, "all of it", false),
            ("HTTP/1.1 100 Continue\r\n\r\n", 0, "", false),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\n\
                 X: y\r\n\r\n",
                200,
                "abc0123456789",
                true,
            ),
        ] {
            match parse(text, 100) {
                Ok(found) => {
                    let expected = Response { status, body: body.into(), is_reusable };
                    assert_eq!(found, expected, "{text}");
                }
                Err(error) => {
                    assert_eq!((status, error.kind()), (0, ErrorKind::UnexpectedEof), "{text}");
                }
            }
        }
    }

    #[test]
    fn a_response_follows_interim_ones() {
        let text = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        let found = read_response(&mut Slow(text.as_bytes()), 10).unwrap();
        assert_eq!((found.status, &*found.body), (200, &b"ok"[..]));
    }

    #[test]
    fn malformed_and_long_responses_are_refused() {
        let ok = "HTTP/1.1 200 OK\r\n";
        let long = format!("{ok}X: {}", "x".repeat(MAX_HEAD_BYTES + 10));
        let chunked = format!("{ok}Transfer-Encoding: chunked\r\n");
        for (text, kind) in [
            (String::new(), ErrorKind::UnexpectedEof),
            (ok.to_owned(), ErrorKind::UnexpectedEof),
            ("NOT HTTP\r\n\r\n".to_owned(), ErrorKind::InvalidData),
            (long, ErrorKind::InvalidData),
            (format!("{ok}Content-Length: 11\r\n\r\n"), ErrorKind::InvalidData),
            (format!("{ok}Content-Length: 5\r\n\r\nhell"), ErrorKind::UnexpectedEof),
            (format!("{ok}Content-Length: +5\r\n\r\nhello"), ErrorKind::InvalidData),
            (
                format!("{ok}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
                ErrorKind::InvalidData,
            ),
            (format!("{ok}Transfer-Encoding: gzip\r\n\r\n"), ErrorKind::InvalidData),
            (format!("{chunked}Content-Length: 5\r\n\r\n"), ErrorKind::InvalidData),
            (format!("{chunked}\r\nb\r\n"), ErrorKind::InvalidData),
            (format!("{chunked}\r\n-1\r\n"), ErrorKind::InvalidData),
            (format!("{chunked}\r\nfffffffffffffffff\r\n"), ErrorKind::InvalidData),
            (format!("{chunked}\r\n2\r\nabc\r\n"), ErrorKind::InvalidData),
            (format!("{chunked}\r\n{}", "0".repeat(3000)), ErrorKind::InvalidData),
            (format!("{chunked}\r\n2\r\nab\r\n"), ErrorKind::UnexpectedEof),
            (format!("{ok}\r\n12345678901"), ErrorKind::InvalidData),
        ] {
            let error = parse(&text, 10).expect_err(&text);
            assert_eq!(error.kind(), kind, "{text}");
        }
    }
}
