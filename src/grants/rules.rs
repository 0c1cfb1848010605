//! The rules of the protocol. Each rule is one function or check in this crate, and a test build can leave
//! each rule out: the simulation must then find a violation.

/// A rule of the protocol. The number in brackets is its number in `docs/grants.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// (1) Every write is conditional on the version of the object that the decision was made from. See
    /// [`condition_of`].
    ConditionalWrites,
    /// (2) A node withdraws SafeToDetach for a generation before it claims with it, and claims only if the
    /// object that this write returns still grants the generation. See [`crate::agent::Permit`].
    IntentBeforeClaim,
    /// (2) An intent always changes the object, because the API server keeps the resourceVersion for a write
    /// that changes nothing, and a delayed SafeToDetach could then still land. See `crate::agent::entries`.
    IntentChangesTheObject,
    /// (3) A claim carries its generation; the storage refuses a generation that the record is ahead of, or
    /// that is sealed. See [`crate::record::Record::admit_claim`].
    ClaimCarriesGeneration,
    /// (3) The storage refuses a claim while a client of another node holds the volume in an incompatible
    /// mode: only the controller fences across nodes. See [`crate::record::Record::admit_claim`].
    NoTakeoverAcrossNodes,
    /// (4) A node that claims again cuts off its own recorded predecessor first. See
    /// [`crate::record::Admission`].
    PredecessorIsCutOff,
    /// (5) Signals come from observation, never from what was requested. See
    /// [`crate::agent::Local::is_safe_to_detach`].
    SignalsAreObserved,
    /// (6) A holder becomes free by SafeToDetach or Fenced of its generation, never by silence. See
    /// `crate::controller::free`.
    SilenceIsNotProof,
    /// (7) A holder is fenced only after its revocation was recorded. See `crate::controller::fence`.
    RevokeBeforeFence,
    /// (7) Fencing seals the generation, so that a client that was not cut off cannot claim with it. See
    /// [`crate::record::Record::seal`].
    FencingSeals,
    /// (8) Fencing a generation does nothing if the record is ahead of it. See
    /// [`crate::record::Record::plan_fence`].
    StaleFenceIsHarmless,
    /// (9) Only a revocation of its generation, or the storage, ends a mapping; a missing grant does not. See
    /// `crate::agent::is_revoked`.
    AbsenceIsNotRevocation,
    /// (10) A refused claim is reported, and the controller moves the grant past the record. See
    /// `crate::agent::entries`.
    RefusalIsReported,
    /// (10) A claim in the record that no grant names gets a holder entry, instead of being fenced or ignored.
    /// See `crate::controller::adopt`.
    ForeignClaimIsAdopted,
    /// (11) A node that was fenced gets no grant of the volume until it reports that it has cleaned up. See
    /// `crate::controller::grant`.
    CleanedBeforeGrant,
    /// (11) Only the machine whose client was fenced can say that it has cleaned up. The client of another machine that
    /// had the same name stays cut off. See `crate::controller::is_of_other_machine`.
    OnlyTheMachineIsClean,
    /// (12) A clock decides when to try, never that something is safe. See `crate::controller::free`.
    ClockProvesNothing,
    /// (6, 12) A holder that reports SafeToDetach is freed only if the record agrees: an etcd that was restored
    /// from a backup can bring back a signal of an earlier use of the same generation. See
    /// `crate::controller::free`.
    RecordConfirmsTheSignal,
}

/// Returns the version that a write requires: the one from which it was decided. Implements
/// [`Rule::ConditionalWrites`].
pub(crate) fn condition_of(stored: &crate::object::StoredGrant) -> Option<crate::object::Version> {
    applies(Rule::ConditionalWrites).then(|| stored.version.clone())
}

/// Returns whether a rule applies: always, except in tests that leave one out.
#[cfg(not(test))]
#[inline]
pub(crate) const fn applies(_rule: Rule) -> bool {
    true
}

#[cfg(test)]
pub(crate) use left_out::{applies, without};

/// The rules that the tests of this thread leave out.
#[cfg(test)]
mod left_out {
    use std::cell::RefCell;

    use super::Rule;

    thread_local! {
        static LEFT_OUT: RefCell<Vec<Rule>> = const { RefCell::new(Vec::new()) };
    }

    pub(crate) fn applies(rule: Rule) -> bool {
        LEFT_OUT.with_borrow(|rules| !rules.contains(&rule))
    }

    /// Runs `run` without `rules`.
    pub(crate) fn without<T>(rules: &[Rule], run: impl FnOnce() -> T) -> T {
        LEFT_OUT.set(rules.to_vec());
        let result = run();
        LEFT_OUT.set(Vec::new());
        result
    }
}
