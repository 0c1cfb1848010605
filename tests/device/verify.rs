//! fio with verification on mapped devices. `CLEAT_VERIFY_SECONDS` is the run time of each test (default
//! 6).

use libtest_mimic::Trial;

use crate::fixture::{Image, Loop, Node, cleat_ok, shell};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("fio_verify_on_file", || on_file(1)),
        trial("fio_verify_on_file_with_4_connections", || on_file(4)),
        trial("fio_verify_on_loop", on_loop),
        trial("fio_verify_on_mem", || verify("mem:192M", 1)),
        trial("zeroes_and_discards_read_as_zero", zeroes),
    ]
}

fn on_file(connections: u32) {
    let image = Image::new("verify", "192M");
    verify(&image.uri(), connections);
}

fn on_loop() {
    let below = Loop::new("verify", "192M");
    verify(&below.uri(), 1);
}

fn verify(uri: &str, connections: u32) {
    let _node = Node::start();
    let device =
        cleat_ok(&["map", uri, "--name", "verify", "--connections", &connections.to_string()]);
    let seconds: u64 = std::env::var("CLEAT_VERIFY_SECONDS")
        .map_or(6, |text| text.parse().expect("CLEAT_VERIFY_SECONDS is a number"));
    // Random reads and writes with occasional fsyncs. fio reads each block back and compares it, repeatedly
    // over the same range.
    let report = shell(&format!(
        "dmesg --clear; fio --name=verify --filename={device} --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw \
           --bsrange=4k-512k --bs_unaligned=0 --size=160M --verify=crc32c --verify_backlog=256 \
           --verify_fatal=1 --fsync=64 --time_based --runtime={seconds} --randseed=7 \
           --output-format=terse --terse-version=3"
    ));
    let fields: Vec<&str> = report.lines().last().unwrap_or_default().split(';').collect();
    assert_eq!(fields.get(4), Some(&"0"), "fio counted errors: {report}");
    println!(
        "figures: {uri}, {connections} connections: {} KiB read, {} KiB written and verified in {seconds} s",
        fields[5], fields[46]
    );
    shell(&format!(
        "fio --name=trim --filename={device} --direct=1 --ioengine=libaio --iodepth=8 --rw=randtrimwrite \
           --bs=64k --size=64M --verify=crc32c --do_verify=0 --output=/tmp/trim.log;
         dmesg | tail -n 200 | grep -E 'I/O error|Buffer I/O' | grep -c {name} && exit 1 || true",
        name = device.trim_start_matches("/dev/")
    ));
    cleat_ok(&["unmap", "verify"]);
}

fn zeroes() {
    let image = Image::new("zeroes", "64M");
    for uri in [image.uri(), "mem:64M".to_owned()] {
        zeroes_on(&uri);
    }
}

pub(crate) fn zeroes_on(uri: &str) {
    let _node = Node::start();
    let device = cleat_ok(&["map", uri, "--name", "zeroes"]);
    shell(&format!(
            "dd if=/dev/urandom of={device} bs=1M count=16 oflag=direct status=none
             blkdiscard --zeroout --offset 1M --length 4M {device}
             dd if={device} bs=1M skip=1 count=4 iflag=direct status=none | cmp -n 4194304 - /dev/zero
             blkdiscard --offset 8M --length 4M {device}
             dd if={device} bs=1M skip=8 count=4 iflag=direct status=none | cmp -n 4194304 - /dev/zero
             if dd if={device} bs=1M skip=6 count=1 iflag=direct status=none | cmp -s -n 1048576 - /dev/zero
             then echo the data between is lost; exit 1; fi"
        ));
    cleat_ok(&["unmap", "zeroes"]);
}
