//! The data path under rate limits.

use std::time::{Duration, Instant};

use cleat_core::policy::OnOutage;
use cleat_core::request::IoError;
use test_kit::nbd::client::Client;
use test_kit::stopwatch::Stopwatch;

use super::flaky::{Fixture, QUEUE, policy};

#[test]
fn average_rates_keep_the_limits_and_0_is_no_limit() {
    let fixture = Fixture::new(policy(OnOutage::Queue, 2000, 0), 2);
    let mut clients = [fixture.connect(), fixture.connect()];
    let rate = measure(&mut clients, Duration::from_secs(2), 512);
    // The burst is a tenth of a second's worth: 5 % of two seconds.
    assert!(rate.is_within(1800.0, 2250.0), "{rate:?} requests/s at a limit of 2000");
    assert!(fixture.page.snapshot().limited_ns > 1_000_000_000);
    fixture.server.set_policy(policy(OnOutage::Queue, 0, 1 << 20));
    let rate = measure(&mut clients, Duration::from_secs(2), 4096);
    // 256 requests are 1 MiB.
    assert!(rate.is_within(256.0 * 0.9, 256.0 * 1.125), "{rate:?} blocks/s at a limit of 1 MiB/s");
    fixture.server.set_policy(QUEUE);
    let limited = fixture.page.snapshot().limited_ns;
    let rate = measure(&mut clients, Duration::from_millis(500), 512);
    assert!(rate.is_within(5000.0, f64::MAX), "{rate:?} requests/s without a limit");
    assert_eq!(fixture.page.snapshot().limited_ns, limited);
}

#[test]
fn a_stop_a_policy_change_and_fail_io_do_not_wait_for_a_limit() {
    let fixture = Fixture::new(policy(OnOutage::Queue, 1, 0), 1);
    let mut client = fixture.connect();
    client.write(1, 0, &[1; 512]);
    client.write(2, 0, &[1; 512]);
    client.expect(1, Ok(()));
    std::thread::sleep(Duration::from_millis(50));
    assert!(client.is_silent());
    let begun = Stopwatch::start();
    fixture.server.set_policy(policy(OnOutage::Queue, 1000, 0));
    client.expect(2, Ok(()));
    fixture.server.set_policy(policy(OnOutage::Queue, 1, 0));
    client.write(3, 0, &[1; 512]);
    client.write(4, 0, &[1; 512]);
    client.expect(3, Ok(()));
    fixture.server.set_fail_io(true);
    client.expect(4, Err(IoError::Broken));
    fixture.server.set_fail_io(false);
    client.write(5, 0, &[1; 512]);
    fixture.server.stop(Duration::from_secs(10)).unwrap();
    assert!(begun.elapsed() < Duration::from_millis(800), "{:?}", begun.elapsed());
}

/// Requests per second.
#[derive(Debug)]
struct Rate {
    /// The rate over the whole time.
    whole: f64,
    /// The rate over the time in which the host did not stall.
    running: f64,
}

impl Rate {
    fn is_within(&self, least: f64, most: f64) -> bool {
        self.running >= least && self.whole <= most
    }
}

/// Measures the rate of clients that always have eight requests in flight.
fn measure(clients: &mut [Client], time: Duration, length: usize) -> Rate {
    let (begun, watch) = (Instant::now(), Stopwatch::start());
    let ended: u64 = std::thread::scope(|scope| {
        let clients: Vec<_> = clients
            .iter_mut()
            .map(|client| {
                scope.spawn(move || {
                    let data = vec![7; length];
                    (0..8).for_each(|cookie| client.write(cookie, 0, &data));
                    let mut count = 0;
                    while begun.elapsed() < time {
                        let (cookie, result) = client.reply();
                        assert_eq!(result, Ok(()));
                        client.write(cookie, 0, &data);
                        count += 1;
                    }
                    (0..8).for_each(|_| assert_eq!(client.reply().1, Ok(())));
                    count
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    let per_s = |time: Duration| ended as f64 / time.as_secs_f64();
    Rate { whole: per_s(time), running: per_s(watch.elapsed().min(time)) }
}
