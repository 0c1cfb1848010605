//! The encryption of extents with AES-256-GCM, and the key of a volume, which a key file protects.
//!
//! No pair of key and nonce is used twice: a data key belongs to one writer and one epoch, and the nonce is the place of
//! the extent in the log of this epoch. A writer builds each object once; a put that is repeated has the same bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};
use zeroize::Zeroizing;

use crate::codec::{Description, WrappedKey};
use crate::name::{Nonce, Position, VolumeId};

/// The bytes that encryption adds to an extent: its authentication tag.
pub(crate) const TAG_BYTES: u16 = 16;
const TAG: usize = TAG_BYTES as usize;

/// The minimum length of the content of a key file in bytes.
pub const MIN_KEY_FILE_BYTES: usize = 32;

/// The length of the key of a volume in bytes.
pub const KEY_BYTES: usize = 32;

/// The data keys that a process keeps; it derives the others again.
const MAX_DATA_KEYS: usize = 256;

/// The content of a key file. It is overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyFile(Zeroizing<Vec<u8>>);

/// The key of an open volume, and the data keys that were derived from it.
pub(crate) struct Cipher {
    volume: VolumeId,
    key: Zeroizing<[u8; KEY_BYTES]>,
    /// By the epoch of the objects.
    known: Mutex<BTreeMap<u64, Arc<DataKey>>>,
}

/// The key for the data of one epoch.
pub(crate) struct DataKey {
    volume: VolumeId,
    key: LessSafeKey,
}

/// The place of an extent. Its data can be decrypted only there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spot {
    /// The log object.
    pub(crate) object: Position,
    /// The first byte in the object, if all extents were stored as they are.
    pub(crate) at: u32,
    /// The first byte in the volume.
    pub(crate) offset: u64,
    /// The length in the volume in bytes.
    pub(crate) length: u32,
    /// The bytes that compression has saved.
    pub(crate) saved: u16,
}

impl KeyFile {
    /// Takes the content of a key file; `None` if it is shorter than [`MIN_KEY_FILE_BYTES`].
    pub fn new(content: &[u8]) -> Option<Self> {
        let is_long = content.len() >= MIN_KEY_FILE_BYTES;
        is_long.then(|| Self(Zeroizing::new(content.to_owned())))
    }

    /// Encrypts the key of a new volume, which is random, for the volume's description.
    pub fn wrap(&self, description: &Description, key: &[u8; KEY_BYTES]) -> WrappedKey {
        let mut bytes = [0; KEY_BYTES + TAG];
        let (wrapped, tag) = bytes.split_at_mut(KEY_BYTES);
        wrapped.copy_from_slice(key);
        let sealed = self.wrapping_key(description).seal_in_place_separate_tag(
            first_nonce(),
            Aad::from(without_key(description)),
            wrapped,
        );
        tag.copy_from_slice(
            sealed.expect("a key is shorter than the limit of the cipher").as_ref(),
        );
        WrappedKey(bytes)
    }

    /// Decrypts the key of a volume; `None` if another key file protects it.
    pub(crate) fn open(&self, description: &Description) -> Option<Cipher> {
        let mut bytes = Zeroizing::new(description.key?.0);
        let aad = Aad::from(without_key(description));
        let wrapping = self.wrapping_key(description);
        let opened = wrapping.open_in_place(first_nonce(), aad, &mut *bytes).ok()?;
        let key = Zeroizing::new(<[u8; KEY_BYTES]>::try_from(&*opened).ok()?);
        Some(Cipher { volume: description.volume, key, known: Mutex::default() })
    }

    /// The key that encrypts the key of one volume, and nothing else.
    fn wrapping_key(&self, description: &Description) -> LessSafeKey {
        let salt = [description.volume.0, description.nonce.0].concat();
        derive(&salt, &self.0, &[b"cleat volume key"])
    }
}

/// Shows nothing of the content.
impl fmt::Debug for KeyFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyFile(hidden)")
    }
}

impl Cipher {
    /// Returns the data key of an epoch, if it was derived before.
    pub(crate) fn known(&self, epoch: u64) -> Option<Arc<DataKey>> {
        self.lock().get(&epoch).cloned()
    }

    /// Returns the data key of an epoch with this writer.
    pub(crate) fn data_key(&self, epoch: u64, writer: Nonce) -> Arc<DataKey> {
        let info: [&[u8]; 2] = [b"cleat data", &epoch.to_le_bytes()];
        let key = derive(&writer.0, &*self.key, &info);
        let key = Arc::new(DataKey { volume: self.volume, key });
        let mut known = self.lock();
        if known.len() >= MAX_DATA_KEYS {
            known.clear();
        }
        known.insert(epoch, Arc::clone(&key));
        key
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<DataKey>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DataKey {
    /// Encrypts the bytes of an extent in place. The last [`TAG_BYTES`] of `bytes` get the tag.
    pub(crate) fn seal(&self, spot: &Spot, bytes: &mut [u8]) {
        let (data, tag) = bytes.split_at_mut(bytes.len() - TAG);
        let aad = Aad::from(spot.associated_data(self.volume));
        let sealed = self.key.seal_in_place_separate_tag(spot.nonce(), aad, data);
        tag.copy_from_slice(sealed.expect("an extent is shorter than the limit").as_ref());
    }

    /// Decrypts the bytes of an extent; `None` if they were not encrypted for this place with this key.
    pub(crate) fn open(&self, spot: &Spot, stored: &[u8]) -> Option<Vec<u8>> {
        let mut bytes = stored.to_owned();
        let aad = Aad::from(spot.associated_data(self.volume));
        let length = self.key.open_in_place(spot.nonce(), aad, &mut bytes).ok()?.len();
        bytes.truncate(length);
        Some(bytes)
    }
}

impl Spot {
    /// Two extents of one epoch differ in the slot or in the place in the object.
    fn nonce(&self) -> ring::aead::Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&self.object.slot.to_le_bytes());
        nonce[8..].copy_from_slice(&self.at.to_le_bytes());
        ring::aead::Nonce::assume_unique_for_key(nonce)
    }

    /// The volume, the log object, and where the data belongs in both.
    fn associated_data(&self, volume: VolumeId) -> [u8; 50] {
        let mut data = [0; 50];
        data[..16].copy_from_slice(&volume.0);
        data[16..24].copy_from_slice(&self.object.epoch.to_le_bytes());
        data[24..32].copy_from_slice(&self.object.slot.to_le_bytes());
        data[32..36].copy_from_slice(&self.at.to_le_bytes());
        data[36..44].copy_from_slice(&self.offset.to_le_bytes());
        data[44..48].copy_from_slice(&self.length.to_le_bytes());
        data[48..].copy_from_slice(&self.saved.to_le_bytes());
        data
    }
}

/// Derives a key with HKDF-SHA256.
fn derive(salt: &[u8], secret: &[u8], info: &[&[u8]]) -> LessSafeKey {
    let derived = Salt::new(HKDF_SHA256, salt).extract(secret);
    let derived = derived.expand(info, &AES_256_GCM).expect("one key is shorter than the limit");
    LessSafeKey::new(UnboundKey::from(derived))
}

/// The nonce of a key that encrypts once.
fn first_nonce() -> ring::aead::Nonce {
    ring::aead::Nonce::assume_unique_for_key([0; NONCE_LEN])
}

/// The description without its key: what the key belongs to.
fn without_key(description: &Description) -> Vec<u8> {
    Description { key: None, ..description.clone() }.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> Description {
        Description::new(VolumeId([1; 16]), Nonce([2; 16]), 1 << 30, 1 << 20)
    }

    fn key_of(file: &KeyFile, description: &Description) -> Option<[u8; KEY_BYTES]> {
        file.open(description).map(|cipher| *cipher.key)
    }

    #[test]
    fn a_key_is_unwrapped_with_its_file_for_its_description_only() {
        assert_eq!(KeyFile::new(&[5; MIN_KEY_FILE_BYTES - 1]), None);
        let [file, other] = [5, 6].map(|byte| KeyFile::new(&[byte; 40]).unwrap());
        assert_eq!(format!("{file:?}"), "KeyFile(hidden)");
        let plain = description();
        let key = Some(file.wrap(&plain, &[9; KEY_BYTES]));
        let wrapped = Description { key, ..plain };
        assert_eq!(key_of(&file, &wrapped), Some([9; KEY_BYTES]));
        assert_eq!(key_of(&other, &wrapped), None);
        let longer = KeyFile::new(&[5; 41]).unwrap();
        assert_eq!(key_of(&longer, &wrapped), None);
        let mut changed = wrapped.key.unwrap();
        changed.0[0] ^= 1;
        let foreign = [
            Description { key: Some(changed), ..wrapped.clone() },
            Description { volume: VolumeId([3; 16]), ..wrapped.clone() },
            Description { nonce: Nonce([3; 16]), ..wrapped.clone() },
            Description { size: 1 << 20, ..wrapped.clone() },
        ];
        for description in foreign {
            assert_eq!(key_of(&file, &description), None, "{description:?}");
        }
    }

    /// Two writers, also of the same epoch in two copies of a volume, have different keys; so have two epochs.
    #[test]
    fn each_writer_and_each_epoch_has_a_key_of_its_own() {
        let file = KeyFile::new(&[5; 40]).unwrap();
        let plain = description();
        let key = Some(file.wrap(&plain, &[9; KEY_BYTES]));
        let cipher = file.open(&Description { key, ..plain }).unwrap();
        let object = Position { epoch: 1, slot: 1 };
        let spot = Spot { object, at: 1, offset: 0, length: 32, saved: 0 };
        let sealed = |epoch: u64, writer: u8| {
            let mut bytes = [0; 32 + TAG];
            cipher.data_key(epoch, Nonce([writer; 16])).seal(&spot, &mut bytes);
            bytes
        };
        assert_eq!(sealed(1, 1), sealed(1, 1));
        assert_ne!(sealed(1, 1)[..32], sealed(1, 2)[..32]);
        assert_ne!(sealed(1, 1)[..32], sealed(2, 1)[..32]);
        for epoch in 0..3 * MAX_DATA_KEYS as u64 {
            cipher.data_key(epoch, Nonce([1; 16]));
            assert!(cipher.lock().len() <= MAX_DATA_KEYS && cipher.known(epoch).is_some());
        }
    }

    #[test]
    fn no_two_places_of_an_epoch_have_the_same_nonce() {
        let mut seen = std::collections::BTreeSet::new();
        for slot in 0..20 {
            for at in 0..20 {
                let object = Position { epoch: 1, slot };
                let spot = Spot { object, at, offset: 0, length: 1, saved: 0 };
                assert!(seen.insert(*spot.nonce().as_ref()));
            }
        }
    }
}
