//! How the servers of a projection divide one limit.
//!
//! Each server computes its own part from what all say of themselves: the max-min fair share (Bertsekas,
//! Gallager, *Data Networks*, 6.5.2). Servers weigh as much as the classes that have work there. A server that is
//! not held up wants what it uses. The rest is for those that are. The parts of all servers add
//! up to the limit as soon as they know the same.

/// What another server wants of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// So many units a second.
    Units(u64),
    /// More than it has.
    More,
    /// Nobody knows: it is not heard of.
    Unknown,
}

/// Another server, as this one knows it.
#[derive(Clone, Copy, Debug)]
pub struct OtherServer {
    /// What it wants.
    pub demand: Demand,
    /// By which it shares with others that want more than they have.
    pub weight: u64,
}

/// The part of a server that has no work: even, so that all may begin at once.
pub fn even_part(limit: u64, servers: usize) -> u64 {
    (limit / servers.max(1) as u64).max(1)
}

/// The part of `limit` that a server with `weight` can have beside `others`. It is for a server that has work.
pub fn part_of(limit: u64, weight: u64, others: &[OtherServer]) -> u64 {
    // A server that is cut off may use its even part: no more than that is certain.
    let even = even_part(limit, others.len() + 1);
    let unknown = others.iter().filter(|other| other.demand == Demand::Unknown).count() as u64;
    let mut rest = limit.saturating_sub(even * unknown);
    let mut weights = u128::from(weight.max(1));
    let mut open: Vec<(u64, u64)> = Vec::with_capacity(others.len());
    for other in others {
        let wanted = match other.demand {
            Demand::Units(0) | Demand::Unknown => continue,
            Demand::Units(units) => units,
            Demand::More => u64::MAX,
        };
        open.push((wanted, other.weight.max(1)));
        weights += u128::from(other.weight.max(1));
    }
    let fair = |rest: u64, weight: u64, weights: u128| {
        u64::try_from(u128::from(rest) * u128::from(weight) / weights).unwrap_or(u64::MAX)
    };
    // Who wants less than its fair share leaves the rest to the others, whose share grows by that.
    while let Some(place) =
        open.iter().position(|(wanted, weight)| *wanted <= fair(rest, *weight, weights))
    {
        let (wanted, weight) = open.swap_remove(place);
        rest -= wanted;
        weights -= u128::from(weight);
    }
    fair(rest, weight.max(1), weights).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(demand: Demand, weight: u64) -> OtherServer {
        OtherServer { demand, weight }
    }

    #[test]
    fn a_server_has_what_others_do_not_want() {
        use Demand::{More, Units, Unknown};
        for (weight, others, part) in [
            (1, vec![], 1200),
            (1, vec![other(Units(200), 1)], 1000),
            (1, vec![other(Units(1000), 1)], 600),
            (1, vec![other(More, 1), other(Units(0), 9)], 600),
            (3, vec![other(More, 1)], 900),
            (1, vec![other(More, 1), other(Units(100), 1)], 550),
            (1, vec![other(Unknown, 100)], 600),
            (5, vec![other(Unknown, 1), other(Unknown, 1), other(Units(0), 1)], 600),
        ] {
            assert_eq!(part_of(1200, weight, &others), part, "{weight} {others:?}");
        }
        assert_eq!(part_of(1, 1, &[other(More, 1), other(Unknown, 1)]), 1);
    }

    /// Whatever they want, they have the limit together, and not more.
    #[test]
    fn the_parts_of_all_add_up_to_the_limit() {
        let limit = 1_000_000;
        for wants in [[100, 700_000, 900_000], [u64::MAX; 3], [0, u64::MAX, 10], [400_000; 3]] {
            let weights = [1, 2, 5];
            let demand = |wanted: u64| match wanted {
                u64::MAX => Demand::More,
                units => Demand::Units(units),
            };
            let had = (0..3).map(|me| {
                let others: Vec<OtherServer> = (0..3)
                    .filter(|one| *one != me)
                    .map(|one| other(demand(wants[one]), weights[one]))
                    .collect();
                part_of(limit, weights[me], &others).min(wants[me])
            });
            let sum: u64 = had.sum();
            let wanted = wants.iter().fold(0_u64, |sum, one| sum.saturating_add(*one));
            let should = limit.min(wanted);
            assert!((should - 10..=should).contains(&sum), "{wants:?}: {sum}");
        }
    }
}
