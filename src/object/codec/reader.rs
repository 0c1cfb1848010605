//! Bytes to fields and back, with every length checked.

use super::Kind;

/// The maximum length of a name in a record or claim, in bytes.
pub const MAX_NAME_BYTES: usize = u8::MAX as usize;

/// Why the bytes of an object are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The bytes end within the header. The number is the length that is needed to continue.
    #[error("the object ends within its header: {0} bytes are needed")]
    Short(usize),
    /// The bytes do not begin as an object of a volume does.
    #[error("the object does not belong to a cleat volume")]
    Magic,
    /// The object has a version that this build does not support.
    #[error("the object has format version {0}, which this build does not support")]
    Version(u8),
    /// The volume has features that this build does not support. The number has one bit for each.
    #[error("the volume has features {0:#x}, which this build does not support")]
    Features(u32),
    /// The header is intact, but that of an object of another kind.
    #[error("the object is of kind {0:?}")]
    Kind(Kind),
    /// The checksum of the header is wrong.
    #[error("the checksum of the object's header is wrong")]
    Checksum,
    /// The checksum of an extent is wrong, or its length.
    #[error("the checksum of the data is wrong")]
    Data,
    /// The data of an extent was not encrypted for its place with the key of the volume.
    #[error("the data is not authentic: it was changed, or moved from another place")]
    Authenticity,
    /// The object belongs to another volume, or to another name in this one.
    #[error("the object was written under another name")]
    Name,
    /// A field has a value that no writer produces.
    #[error("the object has an invalid {0}")]
    Field(&'static str),
}

/// The bytes of a header that are not decoded yet.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8], Damage> {
        let end = self.at.checked_add(length).ok_or(Damage::Field("length"))?;
        let taken = self.bytes.get(self.at..end).ok_or(Damage::Short(end))?;
        self.at = end;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Damage> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Damage> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn u16(&mut self) -> Result<u16, Damage> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, Damage> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Damage> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads reserved bytes.
    pub(super) fn zero(&mut self, length: usize) -> Result<(), Damage> {
        match self.take(length)?.iter().all(|byte| *byte == 0) {
            true => Ok(()),
            false => Err(Damage::Field("reserved field")),
        }
    }

    /// Reads the count of items that follow, each at least `least` bytes long. The items fit into the bytes.
    pub(super) fn count(&mut self, least: usize, max: usize) -> Result<usize, Damage> {
        let count = self.u32()? as usize;
        let left = self.bytes.len() - self.at;
        match count <= max && count <= left / least {
            true => Ok(count),
            false => Err(Damage::Field("count")),
        }
    }

    /// Reads a text of at most [`MAX_NAME_BYTES`] bytes.
    pub(super) fn text(&mut self) -> Result<String, Damage> {
        let length = usize::from(self.u8()?);
        let text = std::str::from_utf8(self.take(length)?);
        text.map(str::to_owned).map_err(|_| Damage::Field("text"))
    }

    /// Reads a text of at most `max` bytes.
    pub(super) fn long_text(&mut self, max: usize) -> Result<String, Damage> {
        let length = self.count(1, max)?;
        let text = std::str::from_utf8(self.take(length)?);
        text.map(str::to_owned).map_err(|_| Damage::Field("text"))
    }

    /// Checks that nothing is left.
    pub(super) fn end(&self) -> Result<(), Damage> {
        match self.at == self.bytes.len() {
            true => Ok(()),
            false => Err(Damage::Field("length of the body")),
        }
    }
}

/// The bytes of a body under construction.
#[derive(Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// Writes a length or a count. Both are bounded by constants far below 4 GiB.
    #[allow(clippy::cast_possible_truncation, reason = "bounded by MAX_HEADER_BYTES")]
    pub(super) fn length(&mut self, value: usize) {
        debug_assert!(u32::try_from(value).is_ok(), "{value}");
        self.u32(value as u32);
    }

    /// Writes a text whose length the caller has checked.
    pub(super) fn long_text(&mut self, text: &str) {
        self.length(text.len());
        self.bytes(text.as_bytes());
    }

    /// Writes a text. What exceeds [`MAX_NAME_BYTES`] is cut off at a character.
    pub(super) fn text(&mut self, text: &str) {
        let end =
            (0..=text.len().min(MAX_NAME_BYTES)).rev().find(|end| text.is_char_boundary(*end));
        let text = &text.as_bytes()[..end.unwrap_or(0)];
        self.0.extend(u8::try_from(text.len()));
        self.bytes(text);
    }
}
