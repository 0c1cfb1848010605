//! What remediation does next with each node: a pure function of what was observed.

use super::beats::Silence;

/// What was observed of a node that has volumes with grants, or is being remediated.
#[derive(Debug, Clone)]
pub(super) struct Observed {
    pub(super) name: String,
    /// Whether it is marked as lost.
    pub(super) lost: bool,
    /// Whether it has the out-of-service taint, from whomever.
    pub(super) tainted: bool,
    /// Whether an administrator works on it.
    pub(super) maintenance: bool,
    pub(super) silence: Silence,
    /// How many nodes that are not observed otherwise have fallen silent at about the same time.
    pub(super) others: usize,
    /// Whether kubelet and agent work again.
    pub(super) is_back: bool,
    /// Whether a grant names it as a holder.
    pub(super) holds: bool,
    /// Whether it asks for a grant.
    pub(super) asks: bool,
    /// Whether a volume is fenced from it, and it has not cleaned up.
    pub(super) fenced: bool,
    /// Whether it may have pods with volumes of the driver.
    pub(super) has_pods: bool,
}

/// The next step for a node. Each can be repeated, and is followed by another observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Mark it as lost: from then on its volumes are revoked and fenced, and it gets none.
    Mark,
    /// Say that it is silent and stays as it is, because it is in maintenance.
    Spare,
    /// Say that it is silent and stays as it is, because so many nodes are.
    Refuse,
    /// Set the taint: all of its volumes are fenced.
    Taint,
    /// Delete the pods with volumes of the driver.
    DeletePods,
    /// Remove mark and taint, when no pod runs with a volume that the node has lost.
    Return,
}

/// Returns the next steps. Only a node that holds a grant or asks for one is marked: without a grant nothing is fenced, and
/// the volumes of its pods cannot move. At most `limit` nodes are marked at the same time: where more are silent, the network is the
/// probable cause, and none is marked.
pub(super) fn plan(nodes: &[Observed], limit: usize) -> Vec<(&str, Step)> {
    let is_silent = |node: &&Observed| {
        node.lost || (!node.maintenance && matches!(node.silence, Silence::Late | Silence::Lost))
    };
    let silent = nodes.iter().filter(is_silent).count();
    let step = |node: &Observed| match node.silence {
        _ if node.lost => of_lost(node),
        Silence::Lost if !node.holds && !node.asks => None,
        Silence::Lost if node.maintenance => Some(Step::Spare),
        Silence::Lost if silent + node.others > limit => Some(Step::Refuse),
        Silence::Lost => Some(Step::Mark),
        Silence::Unknown | Silence::No | Silence::Late => None,
    };
    nodes.iter().filter_map(|node| Some((node.name.as_str(), step(node)?))).collect()
}

fn of_lost(node: &Observed) -> Option<Step> {
    if node.holds {
        // Until it is fenced, its pods may use their volumes.
        None
    } else if node.is_back && !node.fenced {
        Some(Step::Return)
    } else if !node.tainted {
        Some(Step::Taint)
    } else {
        node.has_pods.then_some(Step::DeletePods)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, silence: Silence) -> Observed {
        Observed {
            name: name.to_owned(),
            lost: false,
            tainted: false,
            maintenance: false,
            silence,
            others: 0,
            is_back: false,
            holds: true,
            asks: true,
            fenced: false,
            has_pods: true,
        }
    }

    fn next(node: &Observed) -> Option<Step> {
        plan(std::slice::from_ref(node), 1).first().map(|(_, step)| *step)
    }

    #[test]
    fn a_lost_node_goes_through_all_steps_in_their_order() {
        let mut node = node("a", Silence::Late);
        assert_eq!(next(&node), None);
        node.silence = Silence::Lost;
        assert_eq!(next(&node), Some(Step::Mark));
        node.lost = true;
        assert_eq!(next(&node), None, "its volumes are not fenced yet");
        (node.holds, node.fenced) = (false, true);
        assert_eq!(next(&node), Some(Step::Taint));
        node.tainted = true;
        assert_eq!(next(&node), Some(Step::DeletePods));
        node.has_pods = false;
        assert_eq!(next(&node), None);
        (node.silence, node.is_back) = (Silence::No, true);
        assert_eq!(next(&node), None, "it has not cleaned up");
        node.fenced = false;
        assert_eq!(next(&node), Some(Step::Return));
    }

    #[test]
    fn a_node_that_returns_early_is_still_fenced_or_releases_first() {
        let lost = Observed { lost: true, is_back: true, ..node("a", Silence::No) };
        assert_eq!(next(&lost), None);
        assert_eq!(next(&Observed { holds: false, ..lost }), Some(Step::Return));
    }

    #[test]
    fn a_node_is_marked_only_if_it_holds_a_grant_or_asks_for_one() {
        let silent = node("a", Silence::Lost);
        let of = |holds, asks| next(&Observed { holds, asks, ..silent.clone() });
        assert_eq!(of(true, false), Some(Step::Mark));
        assert_eq!(of(false, true), Some(Step::Mark));
        assert_eq!(of(false, false), None);
    }

    #[test]
    fn many_silent_nodes_and_those_in_maintenance_stay_as_they_are() {
        let nodes =
            [node("a", Silence::Lost), node("b", Silence::Late), node("c", Silence::Unknown)];
        assert_eq!(plan(&nodes, 1), [("a", Step::Refuse)]);
        assert_eq!(plan(&nodes, 2), [("a", Step::Mark)]);
        let repaired = Observed { maintenance: true, ..node("b", Silence::Lost) };
        assert_eq!(plan(&[nodes[0].clone(), repaired], 1), [("a", Step::Mark), ("b", Step::Spare)]);
        let cut_off = Observed { others: 1, ..node("a", Silence::Lost) };
        assert_eq!(plan(&[cut_off], 1), [("a", Step::Refuse)]);
        let lost = Observed { lost: true, ..node("d", Silence::Lost) };
        assert_eq!(plan(&[nodes[0].clone(), lost], 1), [("a", Step::Refuse)]);
    }
}
