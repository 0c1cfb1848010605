//! Objects with several pages that are lost or damaged.

use std::ops::Range;

use super::{BLOCK, Damaged, SIZE, with_two_checkpoints};
use crate::codec::Description;
use crate::name::Name;
use crate::tests::description;
use crate::volume::{Failure, Repair};

fn shared() -> Description {
    description(SIZE, 1 << 20)
}

/// The objects with pages of the first checkpoint, and of the second one.
fn page_objects(damaged: &Damaged) -> [Name; 2] {
    let names = damaged.names("page/");
    let [first, second] = names[..] else { panic!("an object for each checkpoint: {names:?}") };
    [first, second]
}

#[test]
fn all_pages_of_a_lost_object_are_rebuilt() {
    for damage in [Damaged::remove, Damaged::damage] {
        let mut damaged = with_two_checkpoints(&shared());
        let [first, second] = page_objects(&damaged);
        damage(&damaged, second);
        let found = damaged.repairs();
        assert!(!found.repairs.is_empty(), "{found:?}");
        assert!(
            damaged.names("page/").contains(&first),
            "its page of the third mebibyte is needed"
        );
    }
}

#[test]
fn a_damaged_page_is_named_by_its_range_and_the_others_in_its_object_stay() {
    let mut damaged = with_two_checkpoints(&shared());
    let [_, second] = page_objects(&damaged);
    let first_page = {
        let objects = damaged.memory.objects.lock().unwrap();
        let bytes = &objects[&second.to_string()];
        u32::from_le_bytes(bytes[12..16].try_into().unwrap())
    };
    // The second page is that of the second mebibyte. The log above the checkpoint needs only the first page.
    let at = usize::try_from(first_page).unwrap() + 100;
    damaged.memory.objects.lock().unwrap().get_mut(&second.to_string()).unwrap()[at] ^= 1;
    let found = damaged.repairs();
    let [Repair::Page { range, failure, .. }] = &found.repairs[..] else { panic!("{found:?}") };
    assert_eq!(*range, 1 << 20..2 << 20);
    let Failure::Damaged { name, range: Some(Range { start, .. }), .. } = failure else {
        panic!("{failure:?}");
    };
    assert_eq!((*name, *start), (second, u64::from(first_page)));
}

/// A page that did not change is in the object of the earlier checkpoint.
#[test]
fn the_object_of_an_earlier_checkpoint_is_needed_for_the_pages_that_have_not_changed() {
    let mut damaged = Damaged::new(&shared());
    let volume = damaged.open().unwrap();
    damaged.write(&volume, [300], 1);
    damaged.settle(&volume);
    damaged.settle(&volume);
    let [first, _] = page_objects(&damaged);
    damaged.write(&volume, [300], 2);
    damaged.settle(&volume);
    assert!(!damaged.names("page/").contains(&first), "its last page was replaced");
    drop(volume);
    damaged.is_intact();
    let mut sector = [0; 512];
    let view = damaged.open().unwrap();
    crate::tests::block_on(view.read(300 * BLOCK, &mut sector)).unwrap();
    assert_eq!(sector, [2; 512]);
}
