//! Properties of the planner, checked on the model.

use proptest::prelude::*;

use super::model::{Model, ModelDevice, ModelWorker};
use super::record;
use crate::planner::{Intent, MAX_FAILURES, State, WorkerId};
use cleat_kernel::UnmountScope;

const PREDECESSOR: WorkerId = WorkerId { pid: 6, started_ticks: 6 };

fn intents() -> impl Strategy<Value = Intent> {
    let forced = [UnmountScope::All, UnmountScope::Own, UnmountScope::None].map(Intent::Forced);
    prop_oneof![
        2 => Just(Intent::Mapped),
        2 => Just(Intent::Unmapped),
        1 => proptest::sample::select(forced.to_vec()),
    ]
}

fn workers() -> impl Strategy<Value = ModelWorker> {
    prop_oneof![
        Just(ModelWorker::None),
        (0u32..5).prop_map(ModelWorker::Alive),
        Just(ModelWorker::Hung),
        Just(ModelWorker::Dead),
    ]
}

fn models() -> impl Strategy<Value = Model> {
    let handover = proptest::option::of((workers(), any::<bool>()));
    let device = (any::<bool>(), 0u32..5).prop_map(|(ours, served)| ModelDevice { ours, served });
    let devices = proptest::collection::vec(device, 0..4);
    let bits = proptest::array::uniform4(any::<bool>());
    let worker = (workers(), handover);
    (worker, devices, bits, intents(), 1u32..5, 0..MAX_FAILURES + 2).prop_map(
        |((worker, handover), devices, bits, intent, connections, failures)| {
            let [outlives, established, in_use, paths_known] = bits;
            let mut record = record(connections, outlives);
            record.established = established;
            record.intent = intent;
            record.predecessor = handover.map(|_| PREDECESSOR);
            let worker = match worker {
                ModelWorker::Alive(served) => ModelWorker::Alive(served.min(connections)),
                other => other,
            };
            let (predecessor, handed_over) = handover.unwrap_or((ModelWorker::None, false));
            Model {
                devices,
                worker,
                predecessor,
                handed_over,
                in_use,
                paths_known,
                failures,
                ..Model::new(record)
            }
        },
    )
}

/// Checks that the final state describes the model.
fn check_final_state(
    model: &Model,
    state: &State,
    unmapping: bool,
    forced: bool,
) -> Result<(), TestCaseError> {
    match state {
        State::Mapped => {
            prop_assert_eq!(model.devices.iter().filter(|device| device.ours).count(), 1);
            let record = model.record.as_ref().expect("kept");
            let wanted = record.options.connections;
            prop_assert!(matches!(model.worker, ModelWorker::Alive(n) if n >= wanted));
            prop_assert!(record.established && record.predecessor.is_none());
            prop_assert!(!record.fenced && record.replaced.is_none());
        }
        State::Unmapped => {
            prop_assert!(!model.devices.iter().any(|device| device.ours));
            prop_assert!(model.worker.has_ended() && model.predecessor.has_ended());
        }
        State::Held(holders) => {
            prop_assert!(model.in_use && !holders.is_empty() && !forced);
        }
        State::Failed(failure) => {
            prop_assert!(!failure.message.is_empty() && !failure.repair.is_empty());
            // If neither worker of a handover answers, the planner cannot know which one serves.
            let unknown = model.worker == ModelWorker::Hung
                && model.record.as_ref().is_some_and(|record| record.predecessor.is_some());
            prop_assert!(
                !unmapping || unknown && !forced,
                "an unmap ends in Unmapped or Held, not in {failure:?}"
            );
        }
        other => prop_assert!(false, "the final state is {other:?}"),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// From every state, after any faults, the planner reaches a final state that it keeps, and that
    /// describes the mapping.
    #[test]
    fn every_model_reaches_a_true_final_state(
        mut model in models(),
        faults in proptest::collection::vec(0u8..12, 0..24),
        later_intent in intents(),
    ) {
        let foreign: Vec<_> = model.devices.iter().map(|device| !device.ours).collect();
        model.run(&mut faults.into_iter(), 40);
        let unmapping = later_intent != Intent::Mapped;
        // A forced intent is never replaced.
        let intent = model.record.as_ref().map(|record| record.intent);
        let forced = matches!(intent, Some(Intent::Forced(_)));
        if let Some(record) = model.record.as_mut().filter(|_| unmapping && !forced) {
            record.intent = later_intent;
        }
        let forced = forced || matches!(later_intent, Intent::Forced(_));
        let state = model.run(&mut std::iter::empty(), 20).expect("no final state");
        let again = model.clone().run(&mut std::iter::empty(), 1).expect("not kept");
        prop_assert_eq!(&state, &again);
        check_final_state(&model, &state, unmapping, forced)?;
        prop_assert!(!model.replaced_by_zeroes);
        for (index, foreign) in foreign.iter().enumerate() {
            prop_assert!(!foreign || !model.devices[index].ours, "a foreign device was changed");
        }
    }

    /// Without faults, one plan creates a mapping and another one removes it.
    #[test]
    fn one_plan_maps_and_one_unmaps(connections in 1u32..16, outlives in any::<bool>()) {
        let foreign = ModelDevice { ours: false, served: 3 };
        let mut model = Model {
            devices: vec![foreign],
            worker: ModelWorker::None,
            paths_known: false,
            ..Model::new(record(connections, outlives))
        };
        prop_assert_eq!(model.run(&mut std::iter::empty(), 2), Some(State::Mapped));
        model.record.as_mut().expect("kept").intent = Intent::Unmapped;
        prop_assert_eq!(model.run(&mut std::iter::empty(), 2), Some(State::Unmapped));
        prop_assert_eq!(model.devices[0], foreign);
    }
}
