//! The answers to ControllerPublish and ControllerUnpublish. The calls decide nothing: they read the grant
//! that the controller has decided about.

use cleat_core::error::{Error, ErrorKind, Result};

use crate::controller::Request;
use crate::object::{Generation, Signal, VolumeGrant};

/// Answers a request to attach: the generation that the node is granted.
///
/// # Errors
/// Returns `InUse`, which names the holder and since when it holds the volume, if the volume cannot be granted
/// at the moment; `Fenced` if the node was fenced and has not cleaned up; and `Aborted` if the decision is
/// not made yet and the caller must retry.
pub fn publish(grant: Option<&VolumeGrant>, request: &Request) -> Result<Generation> {
    let node = &request.node;
    let pending = || {
        let message = format!("cannot attach the volume to node {node}: the grant is not decided");
        Err(Error::new(ErrorKind::Aborted, message).with_repair("retry the call"))
    };
    let Some(grant) = grant else { return pending() };
    if let Some(holder) = grant.holder(node).filter(|holder| !holder.revoked) {
        if holder.mode == request.mode {
            return Ok(holder.generation);
        }
        let message = format!(
            "cannot attach the volume to node {node}: the node holds it in the mode {:?}",
            holder.mode
        );
        return Err(Error::new(ErrorKind::InUse, message));
    }
    let is_unclean = |generation| !grant.is_true(node, Signal::Cleaned, generation);
    if let Some(fence) = grant.fences_of(node).find(|fence| is_unclean(fence.generation)) {
        let message = format!(
            "cannot attach the volume to node {node}: the node was fenced at {} and has not cleaned up",
            fence.time
        );
        let repair = format!("start the agent on node {node}, or reboot the node");
        return Err(Error::new(ErrorKind::Fenced, message).with_repair(repair));
    }
    let rival = |holder: &&crate::object::Holder| {
        holder.node != *node && !holder.mode.is_compatible(request.mode)
    };
    let Some(rival) = grant.spec.holders.iter().find(rival) else { return pending() };
    let state = if rival.revoked { "revoked" } else { "granted" };
    let message = format!(
        "cannot attach the volume to node {node}: node {} holds it (generation {}, {state} since {})",
        rival.node, rival.generation, rival.since
    );
    let repair = format!("detach the volume from node {}", rival.node);
    Err(Error::new(ErrorKind::InUse, message).with_repair(repair))
}

/// Answers a request to detach from `node`. It succeeds if the node has no grant any more: it has released the
/// volume or was fenced. A request that arrives late, when another node holds the volume, succeeds and changes
/// nothing for that node.
///
/// # Errors
/// Returns `Aborted` as long as the node has a grant: the caller retries.
pub fn unpublish(grant: Option<&VolumeGrant>, node: &str) -> Result<()> {
    let Some(holder) = grant.and_then(|grant| grant.holder(node)) else { return Ok(()) };
    let message = format!(
        "cannot detach the volume from node {node}: the node has not released it (generation {})",
        holder.generation
    );
    let repair = format!(
        "if node {node} is lost, taint it: kubectl taint node {node} \
         node.kubernetes.io/out-of-service=lost:NoExecute"
    );
    Err(Error::new(ErrorKind::Aborted, message).with_repair(repair))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::{Condition, FenceEntry, Holder, Mode, NodeEntry, Reason, Time, Truth};

    fn request(node: &str) -> Request {
        Request { node: node.to_owned(), mode: Mode::ReadWrite, pod_uids: Vec::new() }
    }

    fn held_by(node: &str) -> VolumeGrant {
        let mut grant = VolumeGrant::default();
        grant.spec.holders.push(Holder {
            node: node.to_owned(),
            mode: Mode::ReadWrite,
            generation: Generation(3),
            revoked: false,
            since: Time(1_893_456_000),
            pod_uids: Vec::new(),
        });
        grant
    }

    #[test]
    fn attach_names_the_holder_and_since_when() {
        let grant = held_by("a");
        assert_eq!(publish(Some(&grant), &request("a")).unwrap(), Generation(3));
        let error = publish(Some(&grant), &request("b")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.message().contains("node a"), "{error}");
        assert!(error.message().contains("since 2030-01-01T00:00:00Z"), "{error}");
        let undecided = publish(Some(&VolumeGrant::default()), &request("b")).unwrap_err();
        assert_eq!(undecided.kind(), ErrorKind::Aborted);
        assert_eq!(publish(None, &request("b")).unwrap_err().kind(), ErrorKind::Aborted);
    }

    #[test]
    fn attach_to_a_fenced_node_fails_by_name() {
        let mut grant = VolumeGrant::default();
        grant.status.fences.push(FenceEntry {
            node: "a".to_owned(),
            generation: Generation(3),
            client: None,
            proof: String::new(),
            time: Time(0),
        });
        let error = publish(Some(&grant), &request("a")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced);
        assert!(error.message().contains("node was fenced"), "{error}");
        let other = publish(Some(&grant), &request("b")).unwrap_err();
        assert_eq!(other.kind(), ErrorKind::Aborted);
        let mut entry = NodeEntry { node: "a".to_owned(), ..NodeEntry::default() };
        entry.set(Condition {
            kind: Signal::Cleaned,
            status: Truth::True,
            reason: Reason::Cleaned,
            message: String::new(),
            generation: Generation(3),
            last_transition_time: Time(0),
        });
        grant.status.nodes.push(entry);
        let clean = publish(Some(&grant), &request("a")).unwrap_err();
        assert_eq!(clean.kind(), ErrorKind::Aborted, "the fence is about to be removed");
    }

    #[test]
    fn attach_waits_for_a_decision_that_no_other_node_prevents() {
        let kind = |grant: &VolumeGrant, request: &Request| {
            publish(Some(grant), request).map_err(|error| error.kind())
        };
        // The node gets its next grant when its last one is freed.
        let mut grant = held_by("a");
        grant.spec.holders[0].revoked = true;
        assert_eq!(kind(&grant, &request("a")), Err(ErrorKind::Aborted));
        let error = publish(Some(&grant), &request("b")).unwrap_err();
        assert!(error.message().contains("revoked since"), "{error}");
        let shared = Request { mode: Mode::SharedReadWrite, ..request("b") };
        assert_eq!(kind(&held_by("a"), &shared), Err(ErrorKind::InUse));
        let mut grant = held_by("a");
        grant.spec.holders[0].mode = Mode::SharedReadWrite;
        assert_eq!(kind(&grant, &shared), Err(ErrorKind::Aborted));
        assert_eq!(kind(&grant, &request("a")), Err(ErrorKind::InUse), "it has another mode");
    }

    #[test]
    fn a_late_detach_changes_nothing_for_the_new_holder() {
        let grant = held_by("b");
        assert!(unpublish(Some(&grant), "a").is_ok());
        assert_eq!(unpublish(Some(&grant), "b").unwrap_err().kind(), ErrorKind::Aborted);
        assert!(unpublish(None, "a").is_ok());
    }
}
