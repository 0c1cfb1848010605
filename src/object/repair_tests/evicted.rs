//! A repair with less memory than the map needs.

use super::*;
use crate::tests::byte_at;

/// The pages of the map, below three pages of the index.
const PAGES: u64 = 2200;
const PAGE: u64 = 4096;

/// The page that is lost.
const LOST: u64 = 1500;

/// A volume with data in each page, two checkpoints and a snapshot.
fn large() -> Damaged {
    let mut damaged =
        Damaged::new(&Description { shared_pages: false, ..description(PAGES * PAGE, 4096) });
    let volume = damaged.open().unwrap();
    with_volume(&volume, async {
        for number in 0..PAGES {
            volume.write(number * PAGE, &[7; 512]).await?;
        }
        volume.flush().await
    })
    .unwrap();
    settle(&volume, &damaged.memory);
    with_volume(&volume, async {
        volume.write(5 * PAGE, &[8; 512]).await?;
        volume.flush().await
    })
    .unwrap();
    let before = damaged.objects();
    settle(&volume, &damaged.memory);
    for (name, bytes) in before {
        damaged.memory.objects.lock().unwrap().entry(name).or_insert(bytes);
    }
    take(&volume, "s");
    damaged
}

fn byte(volume: &Volume, page: u64) -> Result<u8, Failure> {
    block_on(byte_at(volume, page * PAGE))
}

/// The page of the map whose loss makes only `LOST` unreadable.
fn page_of_lost(damaged: &mut Damaged) -> Name {
    let place = damaged.place();
    let names = damaged.names("page/");
    let is_it = |name: &Name| {
        let bytes = damaged.memory.objects.lock().unwrap().remove(&name.to_string()).unwrap();
        let view = block_on(place.view(config()));
        let found = view.is_ok_and(|view| {
            byte(&view, LOST).is_err() && byte(&view, LOST + 1).is_ok() && byte(&view, 0).is_ok()
        });
        damaged.memory.objects.lock().unwrap().insert(name.to_string(), bytes);
        found
    };
    names.into_iter().rev().find(is_it).expect("the page of the map")
}

#[test]
fn an_index_that_is_not_in_memory_is_not_taken_for_lost() {
    let mut damaged = large();
    let lost = page_of_lost(&mut damaged);
    damaged.remove(lost);
    let place = damaged.place();
    let small = Config { map_bytes: 8 << 10, ..config() };
    let found = block_on(async {
        let epoch = place.claim_next("repair").await?;
        let found = place.repair(epoch, small, &mut on).await?;
        place.release(epoch).await?;
        Ok::<_, Failure>(found)
    })
    .unwrap();
    assert!(matches!(&found.repairs[..], [Repair::Page { .. }]), "{found:?}");
    let view = block_on(damaged.place().view(config())).unwrap();
    for number in 1..PAGES {
        let expected = if number == 5 { 8 } else { 7 };
        assert_eq!(byte(&view, number), Ok(expected), "page {number}");
    }
}
