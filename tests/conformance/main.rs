//! The conformance suite, run on every backend. A new backend adds one line to the [`suite!`] list; a new
//! transport implements [`client::Volume`] once and runs the same checks.

#![allow(
    unreachable_pub,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and waits in real time"
)]

mod caches;
mod checks;
mod client;
mod files;
mod grants;
mod holders;
mod identity;
mod model;
mod objects;
mod packing;
mod parity;
mod places;
mod rbd;
mod syncs;

use client::Local;
use places::Place;
use test_kit::temp::{in_memory, on_disk};

/// One module of tests for each backend: `name: place`, where a [`Place`] makes fresh volumes.
macro_rules! suite {
    ($($name:ident: $place:expr;)*) => { $(
        mod $name {
            use super::*;

            fn run(check: impl Fn(&dyn client::Volume)) {
                let place: Place = $place;
                check(&Local::open(&place.uri(places::SIZE), place.open_options()));
            }

            #[test]
            fn reads_see_writes_of_other_clients() {
                run(checks::reads_see_writes_of_other_clients);
            }

            #[test]
            fn the_first_and_the_last_block_can_be_written() {
                run(checks::the_first_and_the_last_block_can_be_written);
            }

            #[test]
            fn writes_can_be_made_durable() {
                run(checks::writes_can_be_made_durable);
            }

            #[test]
            fn trimmed_ranges_that_read_as_zeroes_stay_zeroes() {
                run(checks::trimmed_ranges_that_read_as_zeroes_stay_zeroes);
            }

            #[test]
            fn write_zeroes_works_with_every_combination_of_flags() {
                run(checks::write_zeroes_works_with_every_combination_of_flags);
            }

            #[test]
            fn the_longest_payload_is_served() {
                run(checks::the_longest_payload_is_served);
            }

            #[test]
            fn many_requests_are_in_flight_at_once() {
                run(checks::many_requests_are_in_flight_at_once);
            }

            #[test]
            fn random_requests_give_the_same_content_as_the_model() {
                run(model::random_requests_give_the_same_content_as_the_model);
            }

            #[test]
            fn growing_keeps_the_content() {
                run(checks::growing_keeps_the_content);
            }

            #[test]
            fn a_handover_keeps_the_claim_and_the_content() {
                let place: Place = $place;
                checks::a_handover_keeps_the_claim_and_the_content(&place.uri(places::SIZE));
            }

            #[test]
            fn the_identity_is_that_of_the_volume_and_not_of_its_name() {
                let place: Place = $place;
                identity::the_identity_is_that_of_the_volume_and_not_of_its_name(&place);
            }

            #[test]
            fn a_read_only_volume_reports_it_and_refuses_a_resize() {
                let place: Place = $place;
                let uri = place.uri(places::SIZE);
                checks::read_only(&uri);
            }
        }
    )* };
}

suite! {
    mem: Place::mem();
    file_on_disk: Place::file(on_disk(), "");
    file_in_memory: Place::file(in_memory(), "");
    file_direct: Place::file(on_disk(), "direct=true");
    loop_512: Place::loop_device(512, "");
    loop_4096: Place::loop_device(4096, "");
    loop_direct: Place::loop_device(512, "direct=true");
    rbd_plain: Place::rbd(22, "");
    // Long ranges cover many objects.
    rbd_small_objects: Place::rbd(14, "");
    objects_in_a_directory: Place::objects();
    objects_in_s3: Place::s3();
    objects_in_minio: Place::minio();
    objects_packed: Place::packed_objects().with_cache();
    objects_of_an_encrypted_clone: Place::encrypted_clones();
    objects_of_a_clone: Place::clones();
    objects_with_a_cache: Place::objects().with_cache();
}

#[cfg(feature = "fault")]
suite! {
    fault_mem: Place::faulty(Place::mem(), "");
    fault_file: Place::faulty(Place::file(on_disk(), ""), "");
    fault_slow: Place::faulty(Place::file(on_disk(), ""), "fault.jitter=200us");
}
