//! The sidecars of CSI, built from their Go modules.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// A process of a test. It is killed with the value.
pub(crate) struct Sidecar {
    child: Child,
    log: PathBuf,
}

impl Sidecar {
    /// Starts a sidecar with fast retries and these environment variables. Its log is in `directory`.
    pub(crate) fn start(
        name: &str,
        directory: &Path,
        kubeconfig: &Path,
        more: &[String],
        environment: &[(&str, &str)],
    ) -> Self {
        let mut command = Command::new(test_kit::go::control_plane().join(name));
        command.arg(format!("--kubeconfig={}", kubeconfig.display()));
        command.args(["--kube-api-qps=200", "--kube-api-burst=400"]);
        command.args(["--retry-interval-start=100ms", "--retry-interval-max=2s"]).args(more);
        command.envs(environment.iter().copied());
        Self::run(name, directory, command)
    }

    /// Starts any program.
    pub(crate) fn run(name: &str, directory: &Path, mut command: Command) -> Self {
        let log = directory.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let errors = file.try_clone().unwrap();
        let child = command.stdin(Stdio::null()).stdout(file).stderr(errors).spawn();
        Self { child: child.unwrap_or_else(|error| panic!("{name}: {error}")), log }
    }

    /// Returns whether the process has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.end().is_some()
    }

    /// Returns how the process has ended.
    pub(crate) fn end(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("{}: {}", self.log.display(), crate::control_plane::tail(&self.log));
        }
    }
}
