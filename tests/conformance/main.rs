//! One suite over every backend. A new backend adds one line to [`suite!`]'s list below; a new
//! transport implements [`client::Volume`] once and runs the same checks.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::cast_possible_truncation)]

mod caches;
mod checks;
mod client;
mod files;
mod model;
mod parity;
mod places;
mod rbd;

use cleat_backend::OpenOptions;
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
                check(&Local::open(&place.uri(places::SIZE), OpenOptions::default()));
            }

            #[test]
            fn reads_see_writes_of_other_clients() {
                run(checks::reads_see_writes_of_other_clients);
            }

            #[test]
            fn the_edges_are_part_of_the_volume() {
                run(checks::the_edges_are_part_of_the_volume);
            }

            #[test]
            fn writes_can_be_made_durable() {
                run(checks::writes_can_be_made_durable);
            }

            #[test]
            fn trimmed_zeroes_never_turn_back() {
                run(checks::trimmed_zeroes_never_turn_back);
            }

            #[test]
            fn zeroes_are_written_whatever_the_flags() {
                run(checks::zeroes_are_written_whatever_the_flags);
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
            fn any_sequence_agrees_with_the_model() {
                run(model::any_sequence_agrees_with_the_model);
            }

            #[test]
            fn growing_keeps_the_content() {
                run(checks::growing_keeps_the_content);
            }

            #[test]
            fn changes_hands() {
                let place: Place = $place;
                checks::changes_hands(&place.uri(places::SIZE));
            }

            #[test]
            fn a_read_only_volume_says_so_and_keeps_its_content() {
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
    // Long ranges come in many pieces.
    rbd_small_objects: Place::rbd(14, "");
    // What is written is held back until a flush.
    rbd_cached: Place::rbd(22, "config.rbd_cache=true&config.rbd_cache_policy=writeback");
}

#[cfg(feature = "fault")]
suite! {
    fault_mem: Place::faulty(Place::mem(), "");
    fault_file: Place::faulty(Place::file(on_disk(), ""), "");
    fault_slow: Place::faulty(Place::file(on_disk(), ""), "fault.jitter=200us");
}
