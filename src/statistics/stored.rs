//! The words of the header that say how the data of a volume is stored. One worker writes them, and the supervisor reads
//! them also after the worker has died.

use std::sync::atomic::Ordering::Relaxed;

use cleat_core::space::SpaceUse;

use super::{Page, SPACE, UNSAVED};

impl Page {
    /// Sets the data of acknowledged writes that is not durable yet, in bytes. The supervisor can read this also after
    /// the worker has died.
    pub fn set_unsaved(&self, bytes: u64) {
        self.memory.words()[UNSAVED].store(bytes, Relaxed);
    }

    /// Returns the data of acknowledged writes that is not durable yet, in bytes.
    pub fn unsaved(&self) -> u64 {
        self.memory.words()[UNSAVED].load(Relaxed)
    }

    /// Sets what the volume has put to its store and takes there. The values stay after the worker has ended.
    pub fn set_space(&self, space: SpaceUse) {
        let SpaceUse {
            put_bytes,
            written_bytes,
            object_bytes,
            live_bytes,
            copied_bytes,
            copy_rate,
        } = space;
        let values = [put_bytes, written_bytes, object_bytes, live_bytes, copied_bytes, copy_rate];
        for (word, value) in self.memory.words()[SPACE..].iter().zip(values) {
            word.store(value, Relaxed);
        }
    }

    /// Returns what the volume has put to its store and takes there.
    pub fn space(&self) -> SpaceUse {
        let word = |index: usize| self.memory.words()[SPACE + index].load(Relaxed);
        let [put_bytes, written_bytes, object_bytes, live_bytes] = [0, 1, 2, 3].map(word);
        let [copied_bytes, copy_rate] = [4, 5].map(word);
        SpaceUse { put_bytes, written_bytes, object_bytes, live_bytes, copied_bytes, copy_rate }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_of_the_file_sees_how_the_data_is_stored() {
        let (page, file) = Page::create().unwrap();
        let reader = Page::from_fd(file).unwrap();
        assert!(!reader.space().is_counted());
        let space = SpaceUse {
            put_bytes: 6,
            written_bytes: 5,
            object_bytes: 4,
            live_bytes: 3,
            copied_bytes: 2,
            copy_rate: 1,
        };
        page.set_space(space);
        page.set_unsaved(7);
        assert_eq!((reader.space(), reader.unsaved()), (space, 7));
        let seen = reader.snapshot();
        assert_eq!((seen.space, seen.unsaved), (space, 7));
    }
}
