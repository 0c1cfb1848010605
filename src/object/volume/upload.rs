//! The puts of log objects, several at a time; acknowledgements stay in the order of the slots.

use super::access::{Failure, Put, slot};
use super::shared::{Shared, State};
use super::tail::{Closed, Sending};
use crate::codec::LogObject;

impl Shared {
    /// Sends one slot after the other. Several of these run side by side.
    pub(super) async fn upload(&self) -> Failure {
        loop {
            if let Err(failure) = self.upload_next().await {
                self.fail(&failure);
                return failure;
            }
        }
    }

    async fn upload_next(&self) -> Result<(), Failure> {
        let (number, bytes) = self.wait(|state| self.start(state)).await?;
        let put = self.access.put(slot(self.epoch, number), &bytes, u32::MAX).await?;
        if put == Put::Foreign {
            return Err(Failure::Fenced);
        }
        let mut state = self.lock();
        if let Some(sent) = state.tail.slot(number) {
            sent.sending = Sending::Durable;
        }
        state.tail.confirm();
        state.release_kept()?;
        state.changed();
        Ok(())
    }

    /// Chooses a slot to send, and returns the bytes of its object. Closes the open batch if it is full, or if a
    /// flush waits for it and no other flush has a put in flight: flushes that arrive meanwhile share the next put.
    fn start(&self, state: &mut State) -> Option<(u64, Vec<u8>)> {
        let tail = &mut state.tail;
        let is_waiting = |slot: &Closed| slot.sending == Sending::Waiting;
        let mut at = tail.slots.iter().position(is_waiting);
        if at.is_none() && tail.open_records() > 0 {
            let in_flight = |slot: &Closed| slot.for_flush && slot.sending == Sending::Sent;
            let is_full = tail.open_bytes() >= self.config.object_bytes;
            if is_full || tail.flush_wanted && !tail.slots.iter().any(in_flight) {
                at = Some(tail.slots.len());
                tail.close();
            }
        }
        let at = at?;
        let (number, confirmed) = (tail.first + at as u64, tail.confirmed);
        let slot = &mut tail.slots[at];
        slot.sending = Sending::Sent;
        let object = LogObject {
            identity: self.access.identity(self.epoch, number),
            nonce: self.access.nonce,
            confirmed,
            records: slot.records.to_vec(),
        };
        let mut bytes = object.encode();
        slot.header_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&slot.data);
        Some((number, bytes))
    }
}
