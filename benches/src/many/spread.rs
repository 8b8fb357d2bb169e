//! How a figure spreads over many.

/// Values, in order.
#[derive(Clone, Debug, Default)]
pub struct Spread(Vec<f64>);

impl Spread {
    /// Of these values.
    pub fn new(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        Spread(values)
    }

    /// The value that `part` of them (0 to 1) do not exceed; 0 of none.
    pub fn part(&self, part: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * part).ceil() as usize).copied().unwrap_or(0.0)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_hundred() {
        let spread = Spread::new((1..=101).rev().map(f64::from).collect());
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|part| spread.part(part)), [1.0, 51.0, 100.0, 101.0]);
        assert_eq!(Spread::default().part(0.5), 0.0);
    }
}
