//! What the kernel's nbd driver does, settled by experiment: no daemon, hand-made commands, and
//! peers that answer, hold or die on purpose. `docs/kernel-facts.md` has the table of the results;
//! it names these tests. Times are asserted in wide bands only: the order of things is the fact.

mod commands;
mod netlink;
mod peer;
mod sockets;
mod timers;

use libtest_mimic::Trial;

use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    let facts: Vec<(&str, fn())> =
        [timers::facts(), sockets::facts(), commands::facts()].into_iter().flatten().collect();
    facts
        .into_iter()
        .map(|(name, body)| {
            trial(format!("fact_{name}"), move || {
                let _quiet = peer::Quiet::new();
                body();
            })
        })
        .collect()
}
