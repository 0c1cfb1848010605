//! The rules of the protocol that the simulation switches off, one at a time. FORMAT.md has their text.

/// A rule of the protocol. The number in brackets is its number in FORMAT.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "a test leaves each of them out"))]
pub(crate) enum Rule {
    /// (1) Only the opener whose nonce is in the claim writes objects of the epoch.
    Claim,
    /// (3) The end of an epoch is a slot that holds a seal.
    Seal,
    /// (4) A seal in a slot that a checkpoint covers is void.
    Recheck,
    /// (5) An opener starts from the newest checkpoint that it has seen.
    Rebase,
    /// (6) Only the record in slot 0 of its own epoch makes an opener the writer.
    Commit,
    /// (7) Seals are not deleted.
    KeepSeals,
    /// (8) A put that may have succeeded is decided by the nonce in the object.
    Nonce,
    /// (9) Slots are acknowledged in their order.
    Contiguous,
    /// (10) A slot that was confirmed and is missing is reported.
    Witness,
    /// (12) Deletions wait for the base record.
    Base,
    /// (13) A relocation applies only to bytes that lie at the old place.
    Conditional,
    /// (15) A snapshot needs the slots above the checkpoint from which its history starts.
    Tail,
    /// (15) A snapshot needs the data that its map refers to.
    KeepSnapshots,
    /// (16) The history of a snapshot starts from the newest base before it in the log.
    SnapshotBase,
    /// (17) A base record considers all snapshots that precede it.
    LaterSnapshots,
    /// (18) A deleted snapshot is needed until a checkpoint covers the deletion.
    DeletedSnapshots,
    /// (16) The history of a snapshot passes no roll-back.
    AfterRollBack,
    /// (19) After it has created the pin, the creator of a clone looks for tokens.
    LookForToken,
    /// (20) The token of a deletion is created before the pins are listed.
    TokenFirst,
    /// (21) No two attempts have the same token.
    UniqueToken,
    /// (22) The tokens of a deleted snapshot are kept.
    KeepToken,
    /// (23) A clone deletes no object of its parent.
    OwnObjects,
    /// (25) Records of the tail memory that are in the history are not appended again.
    TailCut,
    /// (26) Records of the tail memory are appended only to the history that they continue.
    TailOwner,
    /// (27) What the clone has written since is not copied over.
    Copy,
    /// (28) A clone needs its parent until a base without a reference to it is confirmed.
    OwnBase,
    /// (28) A clone needs its parent as long as a snapshot does.
    OwnSnapshots,
    /// (29) The pin is removed after `flat` was created.
    FlatFirst,
}

/// Returns whether a rule applies: always, except in tests that leave one out.
#[cfg(not(test))]
#[inline]
pub(crate) const fn applies(_rule: Rule) -> bool {
    true
}

#[cfg(test)]
pub(crate) use left_out::{applies, without};

/// The rule that the tests of this thread leave out.
#[cfg(test)]
mod left_out {
    use std::cell::Cell;

    use super::Rule;

    thread_local! {
        static LEFT_OUT: Cell<Option<Rule>> = const { Cell::new(None) };
    }

    pub(crate) fn applies(rule: Rule) -> bool {
        LEFT_OUT.get() != Some(rule)
    }

    /// Runs `run` without `rule`.
    pub(crate) fn without<T>(rule: Option<Rule>, run: impl FnOnce() -> T) -> T {
        LEFT_OUT.set(rule);
        let result = run();
        LEFT_OUT.set(None);
        result
    }
}
