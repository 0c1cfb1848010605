//! Loads the kernel module nbd.

use std::process::Command;
use std::time::Duration;

use super::RealKernel;
use crate::module_missing;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::Result;
use cleat_sys::process::make_ordinary;

/// The time limit for loading the module.
const MODPROBE_TIMEOUT: Duration = Duration::from_secs(10);

impl RealKernel {
    /// Loads the driver if it is missing and loading is allowed. Blocks for at most [`MODPROBE_TIMEOUT`].
    ///
    /// # Errors
    /// Returns `Unsupported` with the output of modprobe.
    pub(super) fn load_module(&self) -> Result<()> {
        // This directory also exists for a built-in driver, because nbd has parameters.
        let loaded = self.sysfs.0.join("module/nbd");
        if loaded.exists() {
            return Ok(());
        }
        if !self.loads_module {
            return Err(module_missing());
        }
        let program = std::fs::read_to_string(self.proc.0.join("sys/kernel/modprobe"));
        let program = program.map(|program| program.trim().to_owned()).unwrap_or_default();
        let program = if program.is_empty() { "/sbin/modprobe".to_owned() } else { program };
        let call = move || make_ordinary(Command::new(program).arg("nbd")).env_clear().output();
        let deadline = SystemClock.now() + MODPROBE_TIMEOUT;
        let output = self.threads.run("load the module nbd", deadline, call, drop)?;
        match output {
            _ if loaded.exists() => Ok(()),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                Err(module_missing().with_source(said.trim().chars().take(500).collect::<String>()))
            }
            Err(error) => Err(module_missing().with_source(error)),
        }
    }
}
