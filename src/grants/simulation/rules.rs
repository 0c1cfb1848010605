//! Each rule is needed: without it, the simulation finds a violation.

use super::run;
use crate::rules::{Rule, without};

/// The number of seeds within which the violation must be found.
const SEEDS: u64 = 5_000;

/// Returns the first violation that the simulation finds without `rules`.
fn found_without(rules: &[Rule]) -> (u64, String) {
    let found = without(rules, || {
        (0..SEEDS).find_map(|seed| run(seed, false).0.map(|violation| (seed, violation)))
    });
    found.unwrap_or_else(|| panic!("no violation in {SEEDS} seeds without {rules:?}"))
}

/// Checks that a violation whose text contains one of `expected` is found without `rules`.
fn finds(rules: &[Rule], expected: &[&str]) {
    let (seed, violation) = found_without(rules);
    let is_expected = expected.iter().any(|text| violation.contains(text));
    assert!(is_expected, "seed {seed} without {rules:?}: {violation}");
}

#[test]
fn writes_without_a_version_are_found() {
    finds(&[Rule::ConditionalWrites], &["is a lie", "was freed while", "withdrawn"]);
}

#[test]
fn a_claim_without_an_intent_is_found() {
    finds(&[Rule::IntentBeforeClaim], &["SafeToDetach of", "was freed while"]);
}

#[test]
fn an_intent_that_changes_nothing_is_found() {
    finds(&[Rule::IntentChangesTheObject], &["SafeToDetach of", "was freed while"]);
}

#[test]
fn a_claim_without_a_generation_is_found() {
    finds(&[Rule::ClaimCarriesGeneration], &["is a lie", "was granted while", "was cut off"]);
}

#[test]
fn a_takeover_across_nodes_is_found() {
    finds(&[Rule::NoTakeoverAcrossNodes], &["two writers"]);
}

#[test]
fn a_predecessor_that_is_not_cut_off_is_found() {
    finds(&[Rule::PredecessorIsCutOff], &["two writers"]);
}

#[test]
fn a_signal_without_an_observation_is_found() {
    finds(&[Rule::SignalsAreObserved], &["SafeToDetach of"]);
}

#[test]
fn silence_as_proof_is_found() {
    finds(&[Rule::SilenceIsNotProof], &["was freed while", "was granted while"]);
}

#[test]
fn a_fence_without_a_revocation_is_found() {
    finds(&[Rule::RevokeBeforeFence], &["was cut off, not revoked"]);
}

#[test]
fn a_fence_without_a_seal_is_found() {
    finds(&[Rule::FencingSeals], &["Fenced of", "was freed while"]);
}

#[test]
fn a_stale_fence_is_found() {
    finds(&[Rule::StaleFenceIsHarmless], &["was cut off, not revoked"]);
}

#[test]
fn an_absent_grant_as_revocation_is_found() {
    finds(&[Rule::AbsenceIsNotRevocation], &["ended by force and not revoked"]);
}

#[test]
fn a_refusal_that_is_not_reported_is_found() {
    finds(&[Rule::RefusalIsReported], &["has not converged"]);
}

#[test]
fn a_foreign_claim_that_is_ignored_is_found() {
    finds(&[Rule::ForeignClaimIsAdopted], &["has not converged", "was cut off, not revoked"]);
}

#[test]
fn a_grant_to_a_node_that_is_not_clean_is_found() {
    finds(&[Rule::CleanedBeforeGrant], &["has not cleaned up"]);
}

#[test]
fn a_clock_as_proof_is_found() {
    finds(&[Rule::ClockProvesNothing], &["was freed while", "withdrawn"]);
}

#[test]
fn a_restored_signal_that_is_believed_is_found() {
    finds(&[Rule::RecordConfirmsTheSignal], &["was freed while"]);
}

#[test]
fn another_machine_that_says_it_is_clean_is_found() {
    finds(&[Rule::OnlyTheMachineIsClean], &["two writers", "Cleaned of"]);
}
