//! Mailboxes that are queues.

use super::*;

#[test]
fn a_queue_brings_every_version_in_order() {
    for bound in 1..=2 {
        for turned in [false, true] {
            explore(4, move || {
                let world = World::new(3, 3, 1);
                let sending = sending(&world, Channel::Queue(bound), 3, WHOLE);
                let receiving = {
                    let world = world.clone();
                    move || {
                        let first = world.receive_next(0, 0, WHOLE)?;
                        Some((first, world.receive_next(0, 1, WHOLE)))
                    }
                };
                let (_, taken) = beside(turned, sending, receiving);
                assert!(matches!(taken, None | Some((1, None | Some(2)))));
            });
        }
    }
}

#[test]
fn a_queue_goes_round_without_writing_what_waits() {
    explore(2, || {
        // Enough versions that the entries are written a second time.
        let world = World::new(2, 2, 1);
        let sender = {
            let world = world.clone();
            thread::spawn(move || {
                let mut sender = LoomSender::new(&world, Channel::Queue(1));
                for _ in 0..QUEUE + 2 {
                    let next = sender.version + 1;
                    sender.send(&world, next, WHOLE);
                }
            })
        };
        let mut position = 0;
        for _ in 0..QUEUE + 1 {
            let taken = world.receive_next(0, position, WHOLE);
            position += u64::from(taken.is_some());
            if taken.is_none() {
                thread::yield_now();
            }
        }
        sender.join().unwrap();
    });
}

#[test]
fn reader_stopped_in_its_queue_blocks_only_its_pins() {
    for steps in 1..=8 {
        for turned in [false, true] {
            explore(4, move || {
                let world = World::new(2, 2, 1);
                let sending = sending(&world, Channel::Queue(1), 3, WHOLE);
                let receiving = {
                    let world = world.clone();
                    move || world.receive_next(0, 0, steps)
                };
                let (mut sender, _) = beside(turned, sending, receiving);
                may_write_when_dead(&world, &mut sender);
            });
        }
    }
}

#[test]
fn closed_queue_frees_slots_without_a_data_pin() {
    explore_turned(3, |turned| {
        let world = World::new(2, 2, 1);
        let mut sender = LoomSender::new(&world, Channel::Queue(1));
        sender.send(&world, 1, WHOLE);
        let shutting = {
            let world = world.clone();
            move || {
                sender.take_down(&world, 0);
                // The first slot again, unless the reader was there.
                sender.send(&world, 3, WHOLE);
            }
        };
        let receiving = {
            let world = world.clone();
            move || world.receive_next(0, 0, WHOLE)
        };
        let (_, found) = beside(turned, shutting, receiving);
        assert!(matches!(found, None | Some(1)), "{found:?}");
        assert_eq!(world.receive_next(0, 0, WHOLE), None);
    });
}

#[test]
fn a_sender_stopped_at_any_step_leaves_a_whole_queue() {
    for steps in 1..=11 {
        for turned in [false, true] {
            explore(4, move || {
                let world = World::new(3, 3, 1);
                let sending = sending(&world, Channel::Queue(2), 3, steps);
                let receiving = {
                    let world = world.clone();
                    move || world.receive_next(0, 0, WHOLE)
                };
                let (_, during) = beside(turned, sending, receiving);
                let after = world.receive_next(0, u64::from(during.is_some()), WHOLE);
                let sent: Vec<_> = [during, after].into_iter().flatten().collect();
                assert_eq!(sent, (1..=sent.len() as u64).collect::<Vec<_>>());
                let finished = (steps - 1) / 5;
                assert!(
                    sent.len() as u32 >= finished.min(1),
                    "{sent:?} of {finished}"
                );
            });
        }
    }
}
