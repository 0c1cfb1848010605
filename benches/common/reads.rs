//! Reads from a worker, as the kernel sends them.

use std::os::unix::net::UnixStream;
use std::time::Instant;

use test_kit::nbd::kernel as nbd;

const MIB: u64 = 1 << 20;

/// Takes the next answer and its data.
pub(crate) fn answer(mut socket: &UnixStream, data: &mut [u8]) {
    assert_eq!(nbd::reply(socket).1, 0);
    std::io::Read::read_exact(&mut socket, data).unwrap();
}

/// Reads this many MiB from the begin of the volume, in reads of 1 MiB. Returns MiB per second.
pub(crate) fn read_in_order(socket: &UnixStream, count: u64, depth: u64) -> f64 {
    let mut data = vec![0; MIB as usize];
    let send = |number: u64| nbd::send(socket, nbd::READ, number, number * MIB, MIB as u32, &[]);
    let began = Instant::now();
    (0..depth).for_each(send);
    for number in 0..count {
        answer(socket, &mut data);
        if number + depth < count {
            send(number + depth);
        }
    }
    count as f64 / began.elapsed().as_secs_f64()
}
