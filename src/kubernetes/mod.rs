//! What joins the crates for Kubernetes with the daemon and with the backends of this program.
//!
//! - Input: the configuration and the supervisor of this node; the settings of the controller.
//! - Output: the CSI driver with the agent for grants ([`csi`]), the storages that the controller can fence
//!   ([`fencing`]), and its calls for external-attacher ([`attach_calls`]).
//!
//! Never allowed here: a decision about a grant, which `cleat-grants` makes.

pub mod agent;
pub mod attach_calls;
pub mod fencing;
mod granted_volumes;

use std::sync::Arc;

use cleat_csi::Driver;
use cleat_node::config::Config;
use cleat_node::executor::Executor;

/// Returns the work of the CSI driver, and of the agent for grants, if the configuration enables it.
pub fn csi(config: &Config, executor: &Arc<Executor>) -> Option<agent::Work> {
    let (csi, node) = (config.csi.clone(), executor.node_name().to_owned());
    if !csi.enabled {
        return None;
    }
    let controller = csi.controller;
    let driver = Driver::new(csi, node, Arc::clone(executor), config.limits.mappings);
    let driver =
        if controller { driver.with_controller(crate::backends::REGISTRY) } else { driver };
    if !config.csi.grants {
        return Some(Box::pin(driver.serve()));
    }
    match agent::with_grants(driver, config, executor) {
        Ok((driver, work)) => Some(Box::pin(async move {
            tokio::join!(driver.serve(), work);
        })),
        Err(error) => {
            // Without the agent, volumes would be mapped without grants.
            tracing::error!("cannot serve CSI: {}", error.report());
            None
        }
    }
}
