//! Inputs and effects as words.

use weightsync_core::WorkerId;

use super::*;

/// Plays a case, line by line.
///
/// # Panics
///
/// If anything else is to be done than the line says.
pub(super) fn play(case: &str) {
    let mut plan = RelayPlan::new();
    for line in case.lines() {
        let (inputs, expected) = line.split_once('>').expect("a line has a `>`");
        let inputs: Vec<PlanInput> = parts(inputs).map(input).collect();
        let effects: Vec<String> = plan.step(inputs).iter().map(effect).collect();
        let expected: Vec<&str> = parts(expected).collect();
        assert_eq!(effects, expected, "at `{}` of\n{case}", line.trim());
    }
}

fn parts(text: &str) -> impl Iterator<Item = &str> {
    let parts = text.split(',').map(str::trim);
    parts.filter(|part| !part.is_empty())
}

fn input(text: &str) -> PlanInput {
    let words: Vec<&str> = text.split_whitespace().collect();
    match words[..] {
        ["join", worker, delivery] => PlanInput::Joined {
            who: who(worker),
            delivery: match delivery {
                "newest" => Delivery::Newest,
                "every" => Delivery::Every { bound: 4 },
                "asked" => Delivery::Asked,
                other => panic!("no delivery: {other}"),
            },
        },
        ["left", worker] => PlanInput::Left { who: who(worker) },
        ["tell", worker, sequence, members] => PlanInput::Notified {
            who: who(worker),
            sequence: number(sequence),
            set: set(members),
        },
        ["answer", worker, question, sequence, members] => PlanInput::Answered {
            who: who(worker),
            question: number(question),
            sequence: number(sequence),
            set: set(members),
        },
        ["withdraw", worker, question] => PlanInput::Withdrawn {
            who: who(worker),
            question: number(question),
        },
        ["parent"] => PlanInput::Parent,
        ["no-parent"] => PlanInput::NoParent,
        ["room"] => PlanInput::MayHaveRoom,
        ["spoiled", name] => PlanInput::Spoiled {
            model: item(&format!("{name}0")).model,
        },
        [word, name] => {
            let item = item(name);
            match word {
                "whole" => PlanInput::Whole { item },
                "rest" => PlanInput::Rest { item },
                "broken" => PlanInput::Broken { item },
                "not-there" => PlanInput::NotThere {
                    item,
                    sender: false,
                },
                "gone" => PlanInput::NotThere { item, sender: true },
                "no-room" => PlanInput::NoRoom { item },
                "from-sender" => PlanInput::FromSender { item },
                "want" => PlanInput::Wanted { item },
                "unwant" => PlanInput::Unwanted { item },
                other => panic!("no input: {other}"),
            }
        }
        _ => panic!("no input: {text}"),
    }
}

fn who(text: &str) -> WorkerInstance {
    let worker = text.trim_end_matches('\'');
    WorkerInstance {
        worker: WorkerId(worker.parse().expect("a worker's number")),
        instance: (text.len() - worker.len()) as u64,
    }
}

fn number(text: &str) -> u64 {
    text[1..].parse().expect("a number after its sign")
}

fn set(text: &str) -> Vec<Item> {
    text.split('+').map(item).collect()
}

fn item(text: &str) -> Item {
    Item {
        model: usize::from(text.as_bytes()[0] - b'a'),
        version: Version(text[1..].parse().expect("a version")),
    }
}

fn effect(effect: &PlanEffect) -> String {
    match effect {
        PlanEffect::Notify { who, sequence, set } => {
            format!("tell {} #{sequence} {}", name(*who), members(set))
        }
        PlanEffect::Answer {
            who,
            question,
            sequence,
            set,
        } => format!(
            "answer {} ?{question} #{sequence} {}",
            name(*who),
            members(set)
        ),
        PlanEffect::Fetch {
            item,
            sender: false,
        } => format!("fetch {}", word(*item)),
        PlanEffect::Fetch { item, sender: true } => format!("fetch {} sender", word(*item)),
        PlanEffect::Stop { item } => format!("stop {}", word(*item)),
        PlanEffect::Release { item } => format!("release {}", word(*item)),
        PlanEffect::Refuse { item } => format!("refuse {}", word(*item)),
    }
}

fn name(who: WorkerInstance) -> String {
    format!("{}{}", who.worker.0, "'".repeat(who.instance as usize))
}

fn members(set: &[Item]) -> String {
    let words: Vec<String> = set.iter().map(|item| word(*item)).collect();
    words.join("+")
}

fn word(item: Item) -> String {
    format!("{}{}", (b'a' + item.model as u8) as char, item.version.0)
}
