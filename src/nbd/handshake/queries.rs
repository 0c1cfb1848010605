//! The data of options that carry a query: INFO and GO, LIST_META_CONTEXT and SET_META_CONTEXT ("Option
//! types").

use super::super::structured::ALLOCATION;
use super::super::wire::{be16, be32};
use super::MAX_STRING;

/// The data of INFO and GO.
pub(super) struct InfoQuery<'a> {
    /// The export's name.
    pub(super) name: &'a [u8],
    /// Big-endian numbers of [`super::super::wire::info`].
    requests: &'a [u8],
}

impl<'a> InfoQuery<'a> {
    /// Parses the option's data. Returns `None` if a length inside is wrong.
    pub(super) fn parse(data: &'a [u8]) -> Option<Self> {
        let (name, rest) = string(data)?;
        let (count, requests) = rest.split_at_checked(2)?;
        (requests.len() == usize::from(be16(count, 0)) * 2 && name.len() <= MAX_STRING)
            .then_some(Self { name, requests })
    }

    /// Returns whether the client requests the information with this number.
    pub(super) fn requests(&self, number: u16) -> bool {
        self.requests.chunks_exact(2).any(|request| be16(request, 0) == number)
    }
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(super) struct ContextQuery<'a> {
    /// The export's name.
    pub(super) name: &'a [u8],
    queries: &'a [u8],
    count: u32,
}

impl<'a> ContextQuery<'a> {
    /// Parses the option's data. Returns `None` if a length inside is wrong.
    pub(super) fn parse(data: &'a [u8]) -> Option<Self> {
        let (name, rest) = string(data)?;
        let (count, queries) = rest.split_at_checked(4)?;
        let query = Self { name, queries, count: be32(count, 0) };
        let mut rest = queries;
        for _ in 0..query.count {
            // Each query takes at least four bytes, so the loop ends early if the count is too large.
            (_, rest) = string(rest)?;
        }
        rest.is_empty().then_some(query)
    }

    /// Returns whether a SET_META_CONTEXT with these queries selects [`ALLOCATION`].
    pub(super) fn sets_allocation(&self) -> bool {
        self.any(|query| query == ALLOCATION)
    }

    /// Returns whether a LIST_META_CONTEXT with these queries lists [`ALLOCATION`]: there is no query, or
    /// one names the context or its namespace.
    pub(super) fn lists_allocation(&self) -> bool {
        self.count == 0 || self.any(|query| query == b"base:" || query == ALLOCATION)
    }

    fn any(&self, matches: impl Fn(&[u8]) -> bool) -> bool {
        let mut rest = self.queries;
        while let Some((query, after)) = string(rest) {
            if matches(query) {
                return true;
            }
            rest = after;
        }
        false
    }
}

/// Splits a string with its length before it from `data`. Returns the string and the rest.
fn string(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_at_checked(4)?;
    rest.split_at_checked(usize::try_from(be32(length, 0)).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap().to_be_bytes();
        let mut data = [&length(name), name].concat();
        data.extend(u32::try_from(queries.len()).unwrap().to_be_bytes());
        queries.iter().for_each(|query| data.extend([&length(query), *query].concat()));
        data
    }

    #[test]
    fn context_queries_are_parsed_or_refused() {
        for (queries, lists, sets) in [
            (&[][..], true, false),
            (&[&b"base:"[..]], true, false),
            (&[ALLOCATION], true, true),
            (&[b"qemu:dirty-bitmap:x", ALLOCATION], true, true),
            (&[b"base:allocation:"], false, false),
            (&[b"qemu:"], false, false),
        ] {
            let data = query(b"disk", queries);
            let parsed = ContextQuery::parse(&data).unwrap();
            assert_eq!(parsed.name, b"disk");
            assert_eq!((parsed.lists_allocation(), parsed.sets_allocation()), (lists, sets));
            for end in 0..data.len() {
                assert!(ContextQuery::parse(&data[..end]).is_none(), "cut at {end}");
            }
            assert!(ContextQuery::parse(&[&data[..], b"x"].concat()).is_none());
        }
        let absurd = [&[0; 4][..], &[0xff; 4], &[0; 64]].concat();
        assert!(ContextQuery::parse(&absurd).is_none());
    }
}
