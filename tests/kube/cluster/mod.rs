//! cleat among the real parts of Kubernetes: kube-controller-manager with its attach/detach and volume controllers,
//! kube-scheduler, and the sidecars of CSI. They work on a control plane of their own, because they change objects of
//! other tests too. Nodes are objects only: the tests do what kubelet does.

mod agents;
mod attach_detach;
mod attacher;
mod forced;
pub(crate) mod installed;
pub(crate) mod objects;
mod pods;
mod provision;
mod replay;
pub(crate) mod sidecar;
