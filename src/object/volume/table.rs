//! The extent map in memory: a bounded part of its pages, and the changes since the last checkpoint.
//!
//! The map has three levels: the root, which is in the checkpoint and always in memory; pages of the index with
//! the names of 1024 map pages each; and map pages. The lower two are loaded when they are needed, and evicted if
//! they were not used for a time. The changes of map pages stay until a checkpoint has written the pages;
//! [`Table::dirty_bytes`] tells when one is due. A changed page can be evicted nevertheless: when it is needed, the
//! changes are made again. So the memory depends on the number of changes and not on the size of the pages. A page of
//! the index changes only in a checkpoint, and is written there at once.
//!
//! A map page that has become empty is no page in memory, but a number in a set of ranges. So a trim of any length
//! takes the memory of one range.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::ranges::Ranges;
use crate::codec::{Entry, MAX_CHILDREN, PageId};
use crate::map::{Page, Replacement};

/// The memory of a page besides its entries, and that of changes besides their list, in bytes.
const OVERHEAD_BYTES: usize = 128;

/// The changes that are made again at most, when a page is loaded.
const MAX_REPEATED: usize = 256;

/// A page that must be loaded before the table can answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// The page of the index with this number.
    Index(u64, PageId),
    /// The map page with this number.
    Leaf(u64, PageId),
}

/// Where the last checkpoint has a part of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// The part has changed since.
    Changed,
    /// In this page; `None`: the part reads as zeroes.
    In(Option<PageId>),
}

impl Stored {
    /// Whether the part is the same, which needs no look at its pages.
    pub(super) fn is_same(self, other: Self) -> bool {
        self != Self::Changed && self == other
    }
}

/// The number of a page: its level, and its place in the level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Index(u64),
    Leaf(u64),
}

enum Content {
    Index(Vec<Option<PageId>>),
    Leaf(Page),
}

struct Cached {
    content: Content,
    /// The name in the last checkpoint.
    id: Option<PageId>,
    bytes: usize,
    /// The place in the order of eviction.
    tick: u64,
    /// The page was used since it got this place.
    is_used: bool,
}

/// What has happened to a map page since the last checkpoint.
struct Changes {
    /// The name of the page in the last checkpoint. `None`: it was empty.
    base: Option<PageId>,
    /// The changes in their order. `None`: they are too many, and the page is not evicted.
    list: Option<Vec<Replacement>>,
    /// The memory of the list in bytes.
    bytes: usize,
}

/// The pages of the map that are in memory.
pub(super) struct Table {
    root: Vec<Option<PageId>>,
    pages: BTreeMap<Key, Cached>,
    /// The changes of map pages that are not empty.
    changes: BTreeMap<u64, Changes>,
    /// The map pages that have become empty since the last checkpoint. Those in `changes` have content again.
    emptied: Ranges,
    /// The pages of the index that the next checkpoint writes, also if nothing below them has changed.
    rewritten: BTreeSet<u64>,
    /// The pages that can be evicted, in the order in which that is tried.
    evictable: BTreeMap<u64, Key>,
    tick: u64,
    /// The memory of the pages, of the lists of changes, and of the pages that are not evicted because of changes.
    page_bytes: usize,
    list_bytes: usize,
    whole_bytes: usize,
    max_bytes: usize,
}

impl Table {
    /// Makes a table from the root in a checkpoint. `leaves` is the number of map pages of the volume.
    pub(super) fn new(root: Vec<Option<PageId>>, leaves: u64, max_bytes: usize) -> Self {
        let mut table = Self {
            root,
            pages: BTreeMap::new(),
            changes: BTreeMap::new(),
            emptied: Ranges::default(),
            rewritten: BTreeSet::new(),
            evictable: BTreeMap::new(),
            tick: 0,
            page_bytes: 0,
            list_bytes: 0,
            whole_bytes: 0,
            max_bytes,
        };
        table.extend(leaves);
        table
    }

    /// The table of a clone: all objects are one generation older.
    pub(super) fn inherited(mut self) -> Self {
        self.root = inherited_pages(self.root, 1);
        for cached in self.pages.values_mut() {
            cached.id = cached.id.map(|id| inherited_page(id, 1));
            match &mut cached.content {
                Content::Index(pages) => *pages = inherited_pages(std::mem::take(pages), 1),
                Content::Leaf(page) => {
                    *page = Page::new(inherited_entries(page.entries().to_vec(), 1));
                }
            }
        }
        for changes in self.changes.values_mut() {
            changes.base = changes.base.map(|id| inherited_page(id, 1));
            for replacement in changes.list.iter_mut().flatten() {
                if let Replacement::Entry(entry) = replacement {
                    *entry = inherited_entry(*entry, 1);
                }
            }
        }
        self
    }

    /// Makes room for a volume with this number of map pages.
    pub(super) fn extend(&mut self, leaves: u64) {
        let length = usize::try_from(leaves.div_ceil(MAX_CHILDREN as u64)).unwrap_or(usize::MAX);
        self.root.resize(length.max(self.root.len()), None);
    }

    /// The memory of all pages in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.page_bytes + self.list_bytes + self.emptied.bytes()
    }

    /// The memory in bytes that a checkpoint makes free.
    pub(super) fn dirty_bytes(&self) -> usize {
        self.list_bytes + self.whole_bytes + self.emptied.bytes()
    }

    /// The number of map pages that a checkpoint writes.
    pub(super) fn changed_pages(&self) -> usize {
        self.changes.len()
    }

    pub(super) fn root(&self) -> &[Option<PageId>] {
        &self.root
    }

    /// Returns a map page, or `None` if its whole range reads as zeroes.
    ///
    /// # Errors
    /// Returns the page that must be loaded first.
    pub(super) fn leaf(&mut self, number: u64) -> Result<Option<&Page>, Missing> {
        if !self.pages.contains_key(&Key::Leaf(number)) {
            match self.base_of(number)? {
                Some(id) => return Err(Missing::Leaf(number, id)),
                None if self.changes.contains_key(&number) => {
                    self.insert_leaf(number, None, Page::default());
                }
                None => return Ok(None),
            }
        }
        Ok(self.touch(Key::Leaf(number)).and_then(|page| match &page.content {
            Content::Leaf(page) => Some(page),
            Content::Index(_) => None,
        }))
    }

    /// Returns the name of a map page to which its changes are made.
    fn base_of(&mut self, number: u64) -> Result<Option<PageId>, Missing> {
        match self.changes.get(&number) {
            Some(changes) => Ok(changes.base),
            None => self.leaf_id(number),
        }
    }

    /// Changes a map page with `change`. A page that has become empty is only a number.
    ///
    /// # Errors
    /// Returns the page that must be loaded first; nothing was changed then.
    pub(super) fn change<R>(
        &mut self,
        number: u64,
        change: impl FnOnce(&mut Page) -> R,
    ) -> Result<R, Missing> {
        if self.leaf(number)?.is_none() {
            self.insert_leaf(number, None, Page::default());
        }
        let cached = self.pages.get_mut(&Key::Leaf(number)).expect("the page was inserted");
        let Content::Leaf(page) = &mut cached.content else { unreachable!("the key says so") };
        let result = change(page);
        let (made, is_empty) = (page.take_replacements(), page.entries().is_empty());
        let (base, bytes, before) = (cached.id, leaf_bytes(page), cached.bytes);
        cached.bytes = bytes;
        self.page_bytes = self.page_bytes + bytes - before;
        if self.is_whole(number) {
            self.whole_bytes = self.whole_bytes + bytes - before;
        }
        match is_empty {
            true => self.drop_empty(number),
            false => self.note(number, base, made, bytes),
        }
        Ok(result)
    }

    /// Removes a map page that has become empty from memory.
    fn drop_empty(&mut self, number: u64) {
        self.forget_changes(number);
        if let Some(cached) = self.pages.remove(&Key::Leaf(number)) {
            self.evictable.remove(&cached.tick);
            self.page_bytes -= cached.bytes;
        }
        if self.root_of(split(number).0).is_some() {
            self.emptied.insert(number);
            self.evict();
        }
    }

    /// Keeps changes of a map page of `page_bytes` bytes.
    fn note(
        &mut self,
        number: u64,
        base: Option<PageId>,
        made: Vec<Replacement>,
        page_bytes: usize,
    ) {
        if made.is_empty() {
            return;
        }
        let new = || Changes { base, list: Some(Vec::new()), bytes: 0 };
        let changes = self.changes.entry(number).or_insert_with(new);
        let Some(list) = &mut changes.list else { return };
        list.reserve_exact(made.len());
        list.extend(made);
        self.list_bytes -= changes.bytes;
        changes.bytes = OVERHEAD_BYTES + size_of_val(list.as_slice());
        if changes.bytes > page_bytes || list.len() > MAX_REPEATED {
            self.keep_whole(number);
        } else {
            self.list_bytes += changes.bytes;
        }
        self.evict();
    }

    /// Keeps a map page in memory instead of the list of its changes.
    fn keep_whole(&mut self, number: u64) {
        if let Some(changes) = self.changes.get_mut(&number) {
            (changes.list, changes.bytes) = (None, OVERHEAD_BYTES);
            self.list_bytes += changes.bytes;
        }
        if let Some(cached) = self.pages.get(&Key::Leaf(number)) {
            self.evictable.remove(&cached.tick);
            self.whole_bytes += cached.bytes;
        }
    }

    fn is_whole(&self, number: u64) -> bool {
        self.changes.get(&number).is_some_and(|changes| changes.list.is_none())
    }

    /// Removes the changes of a map page, which is empty, or was written.
    fn forget_changes(&mut self, number: u64) {
        let Some(changes) = self.changes.remove(&number) else { return };
        self.list_bytes -= changes.bytes;
        if changes.list.is_none() {
            self.whole_bytes -= self.pages.get(&Key::Leaf(number)).map_or(0, |page| page.bytes);
        }
    }

    fn root_of(&self, index: u64) -> Option<PageId> {
        self.root.get(usize::try_from(index).unwrap_or(usize::MAX)).copied().flatten()
    }

    /// Returns the numbers in `numbers` of map pages that are not empty. All are below one page of the index.
    ///
    /// # Errors
    /// Returns the page of the index if it must be loaded first.
    pub(super) fn existing(&mut self, numbers: Range<u64>) -> Result<Vec<u64>, Missing> {
        let (index, first) = split(numbers.start);
        if self.root_of(index).is_none() && self.changes.range(numbers.clone()).next().is_none() {
            return Ok(Vec::new());
        }
        let stored: Vec<bool> = match self.index(index)? {
            Some(pages) => pages.iter().skip(first).map(Option::is_some).collect(),
            None => Vec::new(),
        };
        let is_stored = |place: usize| stored.get(place).copied().unwrap_or(false);
        Ok(numbers
            .enumerate()
            .filter(|(place, number)| {
                self.changes.contains_key(number)
                    || is_stored(*place) && !self.emptied.contains(*number)
            })
            .map(|(_, number)| number)
            .collect())
    }

    /// Returns the name of a map page, `None` if there is none.
    pub(super) fn leaf_id(&mut self, number: u64) -> Result<Option<PageId>, Missing> {
        if self.emptied.contains(number) {
            return Ok(None);
        }
        let (index, child) = split(number);
        Ok(self.index(index)?.and_then(|pages| pages.get(child).copied().flatten()))
    }

    /// Returns a page of the index as the last checkpoint has it, `None` if there is none.
    pub(super) fn index(&mut self, number: u64) -> Result<Option<&[Option<PageId>]>, Missing> {
        if !self.pages.contains_key(&Key::Index(number)) {
            return match self.root_of(number) {
                Some(id) => Err(Missing::Index(number, id)),
                None => Ok(None),
            };
        }
        Ok(self.touch(Key::Index(number)).and_then(|page| match &page.content {
            Content::Index(pages) => Some(pages.as_slice()),
            Content::Leaf(_) => None,
        }))
    }

    /// Returns where the last checkpoint has the map pages below a page of the index.
    pub(super) fn stored_index(&self, index: u64) -> Stored {
        let is_changed = self.changes.range(below(index)).next().is_some()
            || self.emptied.within(below(index)).next().is_some();
        match is_changed {
            true => Stored::Changed,
            false => Stored::In(self.root_of(index)),
        }
    }

    /// Returns where the last checkpoint has a map page.
    ///
    /// # Errors
    /// Returns the page of the index if it must be loaded first.
    pub(super) fn stored_leaf(&mut self, number: u64) -> Result<Stored, Missing> {
        match self.changes.contains_key(&number) || self.emptied.contains(number) {
            true => Ok(Stored::Changed),
            false => self.leaf_id(number).map(Stored::In),
        }
    }

    /// Takes a map page that was loaded. It is ignored if it was replaced meanwhile.
    pub(super) fn supply_leaf(&mut self, number: u64, id: PageId, entries: Vec<Entry>) {
        let is_current = self.base_of(number) == Ok(Some(id));
        if is_current && !self.pages.contains_key(&Key::Leaf(number)) {
            self.insert_leaf(number, Some(id), Page::new(entries));
        }
    }

    /// Takes a page of the index that was loaded. It is ignored if it was replaced meanwhile.
    pub(super) fn supply_index(&mut self, number: u64, id: PageId, pages: Vec<Option<PageId>>) {
        let is_current = self.root_of(number) == Some(id);
        if is_current && !self.pages.contains_key(&Key::Index(number)) {
            self.insert(Key::Index(number), Content::Index(pages), Some(id));
        }
    }

    /// Puts entries in place of a map page that cannot be read. If the page of the index above it is lost, too, that is
    /// taken for empty: all pages below it must be restored then.
    pub(super) fn restore(&mut self, number: u64, entries: Vec<Entry>, index_is_lost: bool) {
        if index_is_lost {
            let (index, _) = split(number);
            self.root[usize::try_from(index).unwrap_or(usize::MAX)] = None;
        }
        self.forget_changes(number);
        if entries.is_empty() {
            return self.drop_empty(number);
        }
        self.insert_leaf(number, None, Page::new(entries));
        self.changes.insert(number, Changes { base: None, list: None, bytes: 0 });
        self.keep_whole(number);
    }

    /// Lets the next checkpoint write the page of the index again, and of the map pages below it those that are chosen,
    /// with the same content.
    ///
    /// # Errors
    /// Returns the page of the index if it must be loaded first.
    pub(super) fn rewrite(
        &mut self,
        index: u64,
        is_chosen: impl Fn(PageId) -> bool,
    ) -> Result<(), Missing> {
        let pages: Vec<Option<PageId>> = self.index(index)?.unwrap_or_default().to_vec();
        let chosen = below(index).zip(pages).filter_map(|(number, id)| Some((number, id?)));
        for (number, id) in chosen.filter(|(_, id)| is_chosen(*id)) {
            if !self.changes.contains_key(&number) && !self.emptied.contains(number) {
                let none =
                    Changes { base: Some(id), list: Some(Vec::new()), bytes: OVERHEAD_BYTES };
                self.changes.insert(number, none);
                self.list_bytes += OVERHEAD_BYTES;
            }
        }
        if self.root_of(index).is_some_and(is_chosen) {
            self.rewritten.insert(index);
        }
        self.evict();
        Ok(())
    }

    /// Returns the pages of the index that a checkpoint writes.
    pub(super) fn dirty_indices(&self) -> Vec<u64> {
        let mut numbers: Vec<u64> = self.changes.keys().map(|number| split(*number).0).collect();
        numbers.dedup();
        numbers.extend(&self.rewritten);
        let emptied = self.emptied.within(0..u64::MAX);
        numbers.extend(emptied.flat_map(|range| split(range.start).0..=split(range.end - 1).0));
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Returns the places in a page of the index of map pages that have become empty.
    pub(super) fn emptied_leaves(&self, index: u64) -> Vec<usize> {
        let ranges = self.emptied.within(below(index));
        ranges.flatten().map(|number| split(number).1).collect()
    }

    /// Returns the numbers of the changed map pages below a page of the index that are not empty.
    pub(super) fn dirty_leaves(&self, index: u64) -> Vec<u64> {
        self.changes.range(below(index)).map(|(number, _)| *number).collect()
    }

    /// Replaces a page of the index, after it and the map pages in `leaves` were written. `leaves` have not changed
    /// since then.
    pub(super) fn replace(
        &mut self,
        index: u64,
        id: Option<PageId>,
        pages: Vec<Option<PageId>>,
        leaves: &[u64],
    ) {
        self.root[usize::try_from(index).unwrap_or(usize::MAX)] = id;
        self.emptied.remove(&below(index));
        self.rewritten.remove(&index);
        for number in leaves {
            self.forget_changes(*number);
            if let Some(cached) = self.pages.get_mut(&Key::Leaf(*number)) {
                cached.id = pages[split(*number).1];
            }
            self.enqueue(Key::Leaf(*number));
        }
        self.insert(Key::Index(index), Content::Index(pages), id);
    }

    /// Puts a map page with the name `id` into memory, and makes its changes again.
    fn insert_leaf(&mut self, number: u64, id: Option<PageId>, mut page: Page) {
        if let Some(list) = self.changes.get(&number).and_then(|changes| changes.list.as_ref()) {
            page.repeat(list);
        }
        self.insert(Key::Leaf(number), Content::Leaf(page), id);
    }

    fn insert(&mut self, key: Key, content: Content, id: Option<PageId>) {
        let bytes = match &content {
            Content::Index(pages) => OVERHEAD_BYTES + size_of_val(pages.as_slice()),
            Content::Leaf(page) => leaf_bytes(page),
        };
        let cached = Cached { content, id, bytes, tick: 0, is_used: true };
        if let Some(old) = self.pages.insert(key, cached) {
            self.evictable.remove(&old.tick);
            self.page_bytes -= old.bytes;
        }
        self.page_bytes += bytes;
        self.enqueue(key);
        self.evict();
    }

    /// Returns a page, which is used.
    fn touch(&mut self, key: Key) -> Option<&Cached> {
        let cached = self.pages.get_mut(&key)?;
        cached.is_used = true;
        Some(cached)
    }

    /// Lets a page be evicted after all others, unless its changes are not in a list.
    fn enqueue(&mut self, key: Key) {
        let is_whole = matches!(key, Key::Leaf(number) if self.is_whole(number));
        let Some(cached) = self.pages.get_mut(&key) else { return };
        self.evictable.remove(&cached.tick);
        self.tick += 1;
        cached.tick = self.tick;
        if !is_whole {
            self.evictable.insert(self.tick, key);
        }
    }

    /// Evicts pages until the rest is within the bound, but not the last two: a page and its index. A page that was used
    /// gets a second chance: an order by the last use would have to be changed in each read.
    fn evict(&mut self) {
        while self.bytes() > self.max_bytes && self.evictable.len() > 2 {
            let Some((_, key)) = self.evictable.pop_first() else { return };
            let Some(cached) = self.pages.get_mut(&key) else { continue };
            if std::mem::take(&mut cached.is_used) {
                self.enqueue(key);
            } else {
                self.page_bytes -= cached.bytes;
                self.pages.remove(&key);
            }
        }
    }
}

/// The page of the index above a map page, and the place in it.
pub(super) fn split(leaf: u64) -> (u64, usize) {
    let children = MAX_CHILDREN as u64;
    (leaf / children, usize::try_from(leaf % children).unwrap_or(usize::MAX))
}

/// The numbers of the map pages below a page of the index.
pub(super) fn below(index: u64) -> Range<u64> {
    let children = MAX_CHILDREN as u64;
    index * children..(index + 1) * children
}

fn leaf_bytes(page: &Page) -> usize {
    OVERHEAD_BYTES + page.bytes()
}

/// Pages that an ancestor has written, as a clone refers to them.
pub(super) fn inherited_pages(pages: Vec<Option<PageId>>, ancestor: u8) -> Vec<Option<PageId>> {
    pages.into_iter().map(|id| id.map(|id| inherited_page(id, ancestor))).collect()
}

fn inherited_page(id: PageId, ancestor: u8) -> PageId {
    PageId { ancestor: id.ancestor.saturating_add(ancestor), ..id }
}

/// Entries that an ancestor has written, as a clone refers to them.
pub(super) fn inherited_entries(entries: Vec<Entry>, ancestor: u8) -> Vec<Entry> {
    entries.into_iter().map(|entry| inherited_entry(entry, ancestor)).collect()
}

fn inherited_entry(entry: Entry, ancestor: u8) -> Entry {
    Entry { ancestor: entry.ancestor.saturating_add(ancestor), ..entry }
}
