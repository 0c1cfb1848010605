//! Experiments on the behaviour of the kernel's nbd driver. They run without the daemon: the tests encode
//! commands themselves, and their peers answer, hold or drop requests. The table of the results in
//! `docs/kernel-facts.md` cites the names of these tests. Times are asserted only with wide margins; the
//! order of events is what the tests check.

mod commands;
mod netlink;
mod peer;
mod sockets;
mod timers;

use libtest_mimic::Trial;

use crate::fixture::repeat;
use crate::trial;

/// They wait for several timeouts of the kernel, and depend on nothing but the kernel, so `make soak` runs them.
const SLOW: [&str; 3] = [
    "lost_requests_are_sent_again_by_the_timer_of_their_start",
    "new_requests_wait_for_a_connection_lost_ones_for_a_replacement",
    "several_connections_send_slow_requests_twice",
];

pub(crate) fn trials() -> Vec<Trial> {
    let facts: Vec<(&str, fn())> =
        [timers::facts(), sockets::facts(), commands::facts()].into_iter().flatten().collect();
    facts
        .into_iter()
        .map(|(name, body)| {
            let fact = trial(format!("fact_{name}"), move || {
                let _paused = peer::PausedUdev::new();
                body();
            });
            fact.with_ignored_flag(SLOW.contains(&name) && repeat().is_none())
        })
        .collect()
}
