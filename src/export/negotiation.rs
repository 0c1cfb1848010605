//! The handshake of a client, driven over its connection's ring before the loop begins.

use std::time::Duration;

use super::End;
use super::connection::{CANCEL, Connection, DEADLINE, RECEIVE};
use super::control::Desired;
use cleat_nbd::handshake::{Export, Handshake, Step};

/// How long a client may take for its handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);

impl Connection {
    /// Negotiates; afterwards the connection is in transmission.
    ///
    /// # Errors
    /// How the connection ended instead.
    pub(super) fn negotiate(&mut self, export: Export) -> Result<(), End> {
        let mut out = Vec::new();
        let mut handshake = Handshake::new(export, &mut out);
        // Without it, a client that says nothing would keep its place for ever.
        assert!(self.ring.timeout(HANDSHAKE_LIMIT, DEADLINE), "a new connection's ring has room");
        loop {
            let (eaten, step) = handshake.advance(self.receive_buffer.unread(), &mut out);
            self.receive_buffer.eat(eaten);
            let sent = self.send_all(&mut out);
            match step {
                // Whoever says goodbye need not wait for the answer.
                Step::End(refusal) => return Err(End::Refused(refusal)),
                Step::Continue => {
                    sent?;
                    if eaten == 0 {
                        self.receive_more()?;
                    }
                }
                Step::Transmission => {
                    sent?;
                    let _ = self.ring.cancel(DEADLINE, CANCEL);
                    self.agreed = handshake.agreed();
                    self.parser.agree(self.agreed);
                    return Ok(());
                }
            }
        }
    }

    fn send_all(&mut self, out: &mut Vec<u8>) -> Result<(), End> {
        if out.is_empty() {
            return Ok(());
        }
        let mut buffer = self.pool.take(out.len()).ok_or(End::Aborted)?;
        buffer.payload_mut().copy_from_slice(out);
        out.clear();
        self.sending.push_buffer(buffer, &mut self.pool);
        while !self.sending.is_idle() {
            self.step()?;
        }
        Ok(())
    }

    fn receive_more(&mut self) -> Result<(), End> {
        self.receive_buffer.receive(&mut self.ring, self.socket, RECEIVE);
        while self.receive_buffer.is_receiving() {
            self.step()?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), End> {
        self.turn().map_err(End::Ring)?;
        if self.control.desired() == Desired::Abort {
            return Err(End::Aborted);
        }
        self.ending.take().map_or(Ok(()), Err)
    }
}
