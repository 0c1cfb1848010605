//! Decides which VolumeAttachments of one volume are created and deleted. No I/O, no clock.
//!
//! The rules are those of the attach/detach controller of Kubernetes: detaches come before attaches, a volume stays
//! attached to a node while a pod there needs it, and a volume for one node is not attached to a second one while the
//! first has it. One rule is stricter. Kubernetes detaches after six minutes whatever the node says; here, the end of
//! the attachment only asks for the grant's end, and the storage fences a node before another one gets the volume.

use std::collections::{BTreeMap, BTreeSet};

/// A pod that needs the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pod {
    /// NAMESPACE/NAME.
    pub(super) name: String,
    pub(super) node: String,
    /// When it was created, in seconds since 1970. The oldest pod comes first.
    pub(super) created: u64,
}

/// A VolumeAttachment of the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attachment {
    pub(super) name: String,
    pub(super) node: String,
    /// Whether it is being deleted.
    pub(super) ending: bool,
    /// Whether the node does not use the volume any more, or is lost.
    pub(super) unused: bool,
}

/// What the decision depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// The pods that need the volume, on nodes that this loop attaches for.
    pub(super) pods: Vec<Pod>,
    pub(super) attachments: Vec<Attachment>,
    /// Whether several nodes may have the volume.
    pub(super) several_nodes: bool,
    /// Whether the volume is being deleted: it is not attached any more.
    pub(super) ending: bool,
}

impl Facts {
    /// Returns whether a node has the volume that no pod there needs, and still uses it.
    pub(super) fn waits(&self) -> bool {
        let is_needed = |node: &str| self.pods.iter().any(|pod| pod.node == node);
        let mut attached = self.attachments.iter().filter(|known| !known.ending && !known.unused);
        attached.any(|known| !is_needed(&known.node))
    }
}

/// What to do, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// The names of the attachments to delete.
    pub(super) detach: Vec<String>,
    /// The nodes to attach to.
    pub(super) attach: Vec<String>,
    /// The pods that cannot start because other pods use the volume on another node, each with that node.
    pub(super) refused: BTreeMap<String, String>,
}

/// Decides.
pub(super) fn plan(facts: &Facts) -> Plan {
    let mut pods: Vec<&Pod> = facts.pods.iter().collect();
    pods.sort_by_key(|pod| (pod.created, &pod.name));
    let needed: BTreeSet<&str> = pods.iter().map(|pod| &*pod.node).collect();
    let attached = |node: &str| facts.attachments.iter().any(|known| known.node == node);
    let mut plan = Plan::default();
    for known in facts.attachments.iter().filter(|known| !known.ending && known.unused) {
        if !needed.contains(&*known.node) {
            plan.detach.push(known.name.clone());
        }
    }
    if facts.ending {
        return plan;
    }
    for pod in pods {
        if attached(&pod.node) || plan.attach.contains(&pod.node) {
            continue;
        }
        let others = facts.attachments.iter().map(|known| &known.node);
        let other = others.chain(&plan.attach).find(|_| !facts.several_nodes);
        match other {
            None => plan.attach.push(pod.node.clone()),
            // Its detach comes first, and is on the way unless a pod there needs the volume.
            Some(node) if needed.contains(&**node) => {
                plan.refused.insert(pod.name.clone(), node.clone());
            }
            Some(_) => {}
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pod(name: &str, node: &str, created: u64) -> Pod {
        Pod { name: name.to_owned(), node: node.to_owned(), created }
    }

    fn attachment(node: &str, ending: bool, unused: bool) -> Attachment {
        Attachment { name: format!("to-{node}"), node: node.to_owned(), ending, unused }
    }

    #[test]
    fn row_06_the_first_pod_gets_the_volume_and_a_second_one_on_its_node_only_a_reference() {
        let mut facts =
            Facts { pods: vec![pod("b", "n1", 2), pod("a", "n1", 1)], ..Facts::default() };
        assert_eq!(plan(&facts).attach, ["n1"]);
        facts.attachments.push(attachment("n1", false, false));
        assert_eq!(plan(&facts), Plan::default());
    }

    #[test]
    fn a_volume_moves_when_its_first_node_does_not_use_it() {
        let mut facts = Facts { pods: vec![pod("new", "n2", 2)], ..Facts::default() };
        facts.attachments.push(attachment("n1", false, false));
        assert_eq!(plan(&facts), Plan::default(), "the node still uses it, and nothing is refused");
        assert!(facts.waits());
        facts.attachments[0].unused = true;
        assert!(!facts.waits());
        assert_eq!(plan(&facts), Plan { detach: vec!["to-n1".to_owned()], ..Plan::default() });
        facts.attachments[0].ending = true;
        assert_eq!(plan(&facts), Plan::default());
        facts.attachments.clear();
        assert_eq!(plan(&facts).attach, ["n2"]);
    }

    #[test]
    fn a_pod_on_a_second_node_is_refused_by_the_name_of_the_first() {
        let pods = vec![pod("old", "n1", 1), pod("new", "n2", 2)];
        let mut facts = Facts { pods, ..Facts::default() };
        let refused = BTreeMap::from([("new".to_owned(), "n1".to_owned())]);
        assert_eq!(
            plan(&facts),
            Plan { attach: vec!["n1".to_owned()], refused: refused.clone(), ..Plan::default() }
        );
        facts.attachments.push(attachment("n1", false, true));
        assert_eq!(plan(&facts), Plan { refused, ..Plan::default() });
        facts.several_nodes = true;
        assert_eq!(plan(&facts).attach, ["n2"]);
    }

    #[test]
    fn a_pod_that_comes_back_keeps_the_attachment() {
        let mut facts = Facts { pods: vec![pod("again", "n1", 5)], ..Facts::default() };
        facts.attachments.push(attachment("n1", false, true));
        assert_eq!(plan(&facts), Plan::default());
        // Too late: the attachment has to end before there is a new one.
        facts.attachments[0].ending = true;
        assert_eq!(plan(&facts), Plan::default());
    }

    fn facts() -> impl Strategy<Value = Facts> {
        let node = || (0..3_u8).prop_map(|node| format!("n{node}"));
        let pods = proptest::collection::vec((node(), 0..9_u64), 0..4);
        let attachments = proptest::collection::btree_map(node(), any::<(bool, bool)>(), 0..3);
        (pods, attachments, any::<bool>(), any::<bool>()).prop_map(
            |(pods, attachments, several_nodes, ending)| {
                let pods = pods.into_iter().enumerate();
                let attachments = attachments.into_iter();
                Facts {
                    pods: pods
                        .map(|(number, (node, created))| pod(&format!("p{number}"), &node, created))
                        .collect(),
                    attachments: attachments
                        .map(|(node, (ending, unused))| attachment(&node, ending, unused))
                        .collect(),
                    several_nodes,
                    ending,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn what_a_pod_needs_is_never_detached_and_one_node_has_a_volume(facts in facts()) {
            let plan = plan(&facts);
            for name in &plan.detach {
                let known = facts.attachments.iter().find(|known| known.name == *name).unwrap();
                prop_assert!(known.unused && !known.ending);
                prop_assert!(facts.pods.iter().all(|pod| pod.node != known.node));
            }
            for node in &plan.attach {
                prop_assert!(!facts.ending && facts.pods.iter().any(|pod| pod.node == *node));
                prop_assert!(facts.attachments.iter().all(|known| known.node != *node));
            }
            if !facts.several_nodes && !plan.attach.is_empty() {
                prop_assert_eq!((facts.attachments.len(), plan.attach.len()), (0, 1));
            }
        }

        /// Carried out again and again, with nodes that release what they are asked for, the plans end.
        #[test]
        fn the_plans_converge(mut facts in facts()) {
            for _ in 0..12 {
                let Plan { detach, attach, .. } = plan(&facts);
                facts.attachments.retain(|known| !known.ending);
                for known in &mut facts.attachments {
                    known.ending |= detach.contains(&known.name);
                    known.unused = true;
                }
                facts.attachments.extend(attach.iter().map(|node| attachment(node, false, false)));
            }
            let last = plan(&facts);
            prop_assert!(last.detach.is_empty() && last.attach.is_empty(), "{:?} {:?}", facts, last);
            for pod in &facts.pods {
                let has = facts.attachments.iter().any(|known| known.node == pod.node);
                prop_assert!(has || facts.ending || last.refused.contains_key(&pod.name), "{:?}", facts);
            }
        }
    }
}
