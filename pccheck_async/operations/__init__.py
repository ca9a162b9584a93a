"""Operations on bytes, and the engines that perform them."""
