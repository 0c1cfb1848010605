//! What is measured, and what has to hold.

use crate::common::client::Load;
use crate::common::report::{BARE, FIO, Must, NBDKIT};

/// Contestants that are started together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// A volume in memory.
    Memory,
    /// A file in the page cache.
    File,
    /// A file in the page cache, four connections.
    FourConnections,
    /// Four volumes in memory, all busy.
    FourVolumes,
    /// A volume in memory, with and without a large write before each measurement.
    AfterLargeWrite,
    /// A file without the page cache.
    Direct,
}

/// One load.
pub struct Row {
    pub group: Group,
    pub name: &'static str,
    pub load: Load,
    /// The requests in flight of each connection.
    pub depth: usize,
    pub must: &'static [Must],
}

use Must::{Cpu, FastestPeer, Rate};

pub const OTHER: &str = "cleat, other build";
pub const NO_POLLING: &str = "cleat, no polling";
pub const LARGE_WRITE: &str = "cleat, no large write";

const fn row(
    group: Group,
    name: &'static str,
    writes_percent: u64,
    block: usize,
    depth: usize,
    must: &'static [Must],
) -> Row {
    let load = Load { writes_percent, sequential: false, block };
    Row { group, name, load, depth, must }
}

const fn sequential(row: Row) -> Row {
    Row { load: Load { sequential: true, ..row.load }, ..row }
}

const K: usize = 1 << 10;

use Group::{AfterLargeWrite, Direct, File, FourConnections, FourVolumes, Memory};

pub const ROWS: [Row; 31] = [
    row(Memory, "mem: 4K random read, depth 1", 0, 4 * K, 1, &[FastestPeer(1.15)]),
    row(Memory, "mem: 4K random read, depth 2", 0, 4 * K, 2, &[FastestPeer(1.15)]),
    row(Memory, "mem: 4K random read, depth 8", 0, 4 * K, 8, &[Rate(BARE, 0.8)]),
    row(
        Memory,
        "mem: 4K random read, depth 32",
        0,
        4 * K,
        32,
        &[Rate(NBDKIT, 2.7), Rate(BARE, 0.8), Cpu(NBDKIT, 0.5)],
    ),
    row(
        Memory,
        "mem: 4K random read, depth 128",
        0,
        4 * K,
        128,
        &[Rate(NBDKIT, 4.0), Rate(BARE, 0.8)],
    ),
    row(Memory, "mem: 4K random write, depth 1", 100, 4 * K, 1, &[FastestPeer(1.15)]),
    row(Memory, "mem: 4K random write, depth 2", 100, 4 * K, 2, &[FastestPeer(1.15)]),
    row(Memory, "mem: 4K random write, depth 32", 100, 4 * K, 32, &[Cpu(NBDKIT, 0.5)]),
    row(Memory, "mem: 4K random, 30 % writes, depth 32", 30, 4 * K, 32, &[Cpu(NBDKIT, 0.5)]),
    row(File, "file: 4K random read, depth 1", 0, 4 * K, 1, &[FastestPeer(1.15)]),
    row(File, "file: 4K random read, depth 2", 0, 4 * K, 2, &[FastestPeer(1.15)]),
    row(File, "file: 4K random read, depth 8", 0, 4 * K, 8, &[]),
    row(
        File,
        "file: 4K random read, depth 32",
        0,
        4 * K,
        32,
        &[Rate(NBDKIT, 2.5), Cpu(NBDKIT, 0.5)],
    ),
    row(File, "file: 4K random read, depth 128", 0, 4 * K, 128, &[Rate(NBDKIT, 4.0)]),
    row(File, "file: 4K random write, depth 1", 100, 4 * K, 1, &[FastestPeer(1.15)]),
    row(File, "file: 4K random write, depth 2", 100, 4 * K, 2, &[FastestPeer(1.15)]),
    row(
        File,
        "file: 4K random write, depth 32",
        100,
        4 * K,
        32,
        &[Rate(NBDKIT, 2.0), Cpu(NBDKIT, 0.5)],
    ),
    row(File, "file: 4K random, 30 % writes, depth 32", 30, 4 * K, 32, &[Cpu(NBDKIT, 0.5)]),
    row(File, "file: 64K random read, depth 8", 0, 64 * K, 8, &[]),
    row(File, "file: 256K random read, depth 8", 0, 256 * K, 8, &[Rate(NBDKIT, 2.2)]),
    row(File, "file: 256K random write, depth 8", 100, 256 * K, 8, &[Rate(NBDKIT, 1.6)]),
    sequential(row(File, "file: 64K sequential read, depth 8", 0, 64 * K, 8, &[])),
    sequential(row(File, "file: 64K sequential write, depth 8", 100, 64 * K, 8, &[])),
    row(FourConnections, "4 connections: 4K random read, depth 8", 0, 4 * K, 8, &[]),
    row(FourConnections, "4 connections: 4K random read, depth 32", 0, 4 * K, 32, &[]),
    row(FourVolumes, "4 volumes: 4K random read, depth 1", 0, 4 * K, 1, &[Rate(NO_POLLING, 0.95)]),
    row(
        FourVolumes,
        "4 volumes: 4K random read, depth 32",
        0,
        4 * K,
        32,
        &[Rate(NO_POLLING, 0.95)],
    ),
    row(
        AfterLargeWrite,
        "after a large write: 4K random read, depth 1",
        0,
        4 * K,
        1,
        &[Rate(LARGE_WRITE, 0.95)],
    ),
    row(
        AfterLargeWrite,
        "after a large write: 4K random read, depth 32",
        0,
        4 * K,
        32,
        &[Rate(LARGE_WRITE, 0.95)],
    ),
    row(Direct, "O_DIRECT: 4K random read, depth 1", 0, 4 * K, 1, &[]),
    row(Direct, "O_DIRECT: 4K random read, depth 32", 0, 4 * K, 32, &[Rate(FIO, 0.9)]),
];
